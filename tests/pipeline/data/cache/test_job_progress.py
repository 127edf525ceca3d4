"""Position of a job in its two orders, and its next use of a sample."""

from dataclasses import replace

from small_policies import ALONE

from penstock.pipeline.data.cache.policy import NEVER, Job, JobProgress

JOB = Job(name="a", data="d", num_samples=5, batch_size=2, times=replace(ALONE, epoch=10.0))
UNMEASURED = replace(JOB, times=None)


def progress(job: Job = JOB) -> JobProgress:
    found = JobProgress(job)
    found.begin([4, 2, 0, 1, 3], [0, 1, 2, 3, 4], 0.0)
    return found


def test_before_its_use_a_sample_is_used_in_this_epoch_and_behind_it_in_the_next():
    found = progress()
    assert [found.next_use(index) for index in range(5)] == [2, 3, 1, 4, 0]
    found.use(2, 1.0)  # not in the order that was said
    assert [found.next_use(index) for index in range(5)] == [2, 3, 7, 4, 0]
    assert found.begin([0, 1, 2, 3, 4], None, 9.0) is False  # four were not used
    assert [found.next_use(index) for index in range(5)] == [5, 6, 7, 8, 9]
    found.use(0, 9.0)
    assert found.next_use(0) == NEVER


def test_an_epoch_may_use_some_of_the_samples():
    found = progress()
    found.begin([0, 1], [1, 2], 2.0)
    assert [found.next_use(index) for index in range(5)] == [5, 6, 8, NEVER, NEVER]


def test_an_epoch_is_as_announced_if_it_was_said_and_the_last_one_is_over():
    found = progress()
    for index in range(5):
        found.use(index, 1.0)
    assert found.begin([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], 2.0)
    for index in range(5):
        found.use(index, 3.0)
    assert not found.begin([4, 3, 2, 0, 1], None, 4.0)
    for index in range(5):
        found.use(index, 5.0)
    assert not found.begin([0, 1, 2, 3, 4], None, 6.0)  # the last was said to be the last


def test_batches_are_numbered_over_all_epochs():
    found = progress()
    assert [found.batch_of(position) for position in range(10)] == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]
    found.begin([0, 1, 2, 3, 4], None, 1.0)
    assert [found.batch_of(position) for position in range(5, 10)] == [3, 3, 4, 4, 5]


def test_the_pace_is_that_of_the_last_epoch_else_of_the_warm_up_else_of_the_uses_so_far():
    measured = progress()
    assert measured.pace == 2.0
    for index in range(5):
        measured.use(index, 1.0)
    measured.begin([0, 1, 2, 3, 4], None, 20.0)
    assert measured.pace == 4.0
    measured.update(replace(JOB, times=replace(ALONE, epoch=5.0)))
    assert measured.pace == 1.0
    unmeasured = progress(UNMEASURED)
    paces = []
    for index, now in ((4, 3.0), (2, 6.0), (0, 6.0)):
        unmeasured.use(index, now)
        paces.append(unmeasured.pace)
    assert paces == [None, 3.0, 2.0]  # less than a batch says little


def test_the_next_use_is_so_many_positions_from_the_last():
    found = progress()
    found.use(4, 3.0)
    assert found.time_of(1, 3.0, 9.0) == 3.0
    assert found.time_of(4, 3.0, 9.0) == 9.0
    assert found.time_of(0, 3.0, 9.0) == 3.0  # was due, and comes any moment
    assert found.time_of(4, 5.0, 9.0) == 9.0  # a batch may take that long
    assert found.time_of(4, 10.0, 9.0) == 12.0  # it stands since 6.0
    assert progress(UNMEASURED).time_of(3, 0.0, 9.0) == 27.0
