"""Where a job is in its two orders, and when it comes to a sample again."""

from dataclasses import replace

import pytest
from small_policies import ALONE

from penstock import ConfigError
from penstock.pipeline.samples.cache.job_progress import NEVER, Course
from penstock.pipeline.samples.cache.policy import Job

JOB = Job(name="a", data="d", num_samples=5, batch_size=2, times=replace(ALONE, epoch=10.0))
UNTOLD = replace(JOB, times=None)


def course(job: Job = JOB, *, watch: bool = True) -> Course:
    found = Course(job, watch=watch)
    found.begin([4, 2, 0, 1, 3], [0, 1, 2, 3, 4], 0.0)
    return found


def test_before_its_use_a_sample_is_used_in_this_epoch_and_behind_it_in_the_next():
    found = course()
    assert [found.next_use(index) for index in range(5)] == [2, 3, 1, 4, 0]
    found.use(2, 1.0)  # not in the order that was said
    assert [found.next_use(index) for index in range(5)] == [2, 3, 7, 4, 0]
    assert found.begin([0, 1, 2, 3, 4], None, 9.0) is False  # four were not used
    assert [found.next_use(index) for index in range(5)] == [5, 6, 7, 8, 9]
    found.use(0, 9.0)
    assert found.next_use(0) == NEVER


def test_strange_samples_are_never_used():
    found = course()
    assert (found.next_use(-1), found.next_use(5)) == (NEVER, NEVER)
    found.use(5, 1.0)
    found.use(-1, 1.0)
    assert found.passed == 0
    found.begin([0, 1], [1, 2], 2.0)
    assert [found.next_use(index) for index in range(5)] == [5, 6, 8, NEVER, NEVER]


def test_an_epoch_is_as_foretold_if_it_was_said_and_the_last_one_is_over():
    found = course()
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
    found = course()
    assert [found.batch_of(position) for position in range(10)] == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]
    found.begin([0, 1, 2, 3, 4], None, 1.0)
    assert [found.batch_of(position) for position in range(5, 10)] == [3, 3, 4, 4, 5]


def test_the_pace_is_told_or_that_of_the_uses_so_far_and_then_seen_unless_nobody_shall_watch():
    watched, told = course(), course(watch=False)
    assert watched.pace == told.pace == 2.0
    for found in (watched, told):
        for index in range(5):
            found.use(index, 1.0)
        found.begin([0, 1, 2, 3, 4], None, 20.0)
    assert (watched.pace, told.pace) == (4.0, 2.0)
    watched.tell(replace(JOB, times=replace(ALONE, epoch=5.0)))
    assert watched.pace == 1.0
    untold = course(UNTOLD)
    paces = []
    for index, now in ((4, 3.0), (2, 6.0), (0, 6.0)):
        untold.use(index, now)
        paces.append(untold.pace)
    assert paces == [None, 3.0, 2.0]  # less than a batch says little


def test_the_next_use_is_so_many_positions_from_the_last():
    found = course()
    found.use(4, 3.0)
    assert found.when(1, 3.0, 9.0) == 3.0
    assert found.when(4, 3.0, 9.0) == 9.0
    assert found.when(0, 3.0, 9.0) == 3.0  # was due, and comes any moment
    assert found.when(4, 5.0, 9.0) == 9.0  # a batch may take that long
    assert found.when(4, 10.0, 9.0) == 12.0  # it stands since 6.0
    assert course(UNTOLD).when(3, 0.0, 9.0) == 27.0


def test_an_order_holds_samples_that_there_are_each_once():
    found = course()
    for order in ([0, 5], [-1, 0], [1, 1]):
        for orders in ((order, None), ([0], order)):
            with pytest.raises(ConfigError, match="of the job a"):
                found.begin(*orders, 1.0)
    assert found.next_use(4) == 0  # and nothing has changed
