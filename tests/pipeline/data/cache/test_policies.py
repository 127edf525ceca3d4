"""The policies of the cache, step by step, and how close they come to the offline optimum."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from brokers import ALONE, Watched, watched_lru
from cache import Load, optimum, simulate

from penstock.pipeline.data.cache.next_use import NextUse
from penstock.pipeline.data.cache.policies import Lru
from penstock.pipeline.data.cache.policy import NEVER, Job, JobProgress


def test_lru_lets_go_what_was_used_longest_ago():
    kept = watched_lru(30)
    for name, data in (("0", "d"), ("1", "e")):
        kept.join(Job(name=name, data=data, num_samples=9, batch_size=3), 0.0)
    assert all(kept.takes("0", index) for index in (0, 1, 2))
    kept.use("0", 0, 0.0)
    assert kept.offer("1", 7, 20, 0.0) == (("e", 7), (("d", 1), ("d", 2)))
    assert kept.offer("1", 8, 31, 0.0) == (None, ())
    assert kept.offer("1", 7, 20, 0.0) == (("e", 7), ())
    assert kept.leave("1", 0.0) == (("e", 7),)
    assert all(kept.takes("0", index) for index in (3, 4))
    assert kept.offer("0", 5, 10, 0.0).evicted == (("d", 0),)
    kept.drop(("d", 3))
    assert kept.offer("0", 6, 20, 0.0).evicted == (("d", 4),)  # what is gone does not go again


@pytest.mark.parametrize("make", [NextUse, Lru])
def test_samples_stay_so_long_behind_the_last_job_for_one_that_comes(make):
    kept, order = Watched(make(50, keep=60.0)), [0, 1, 2, 3]

    def epoch(name: str, data: str, *, now: float, order: Sequence[int] = order) -> list[bool]:
        """One job of one epoch; which of its samples were there."""
        kept.join(Job(name=name, data=data, num_samples=len(order), batch_size=2), now)
        gone = kept.begin(name, order, None, now)
        assert all(entry[0] != data for entry in gone)
        hits = [kept.use(name, index, now).entry is not None for index in order]
        for index, hit in zip(order, hits, strict=True):
            assert hit or kept.offer(name, index, 10, now).entry is not None
        assert kept.leave(name, now) == ()
        return hits

    assert epoch("a", "d", now=0.0) == [False] * 4
    assert epoch("b", "d", now=60.0) == [True] * 4
    assert epoch("c", "d", now=120.0, order=order[:2]) == [True] * 2  # of fewer samples: others are not asked
    kept.join(Job(name="e", data="e", num_samples=9, batch_size=2), 180.0)
    assert kept.begin("e", range(9), range(9), 180.0) == ()
    assert [kept.takes("e", index, 180.0) for index in range(5)] == [True] * 5  # who comes is served first
    assert len(kept.entries) == 5
    kept.leave("e", 180.0)
    assert set(kept.leave("nobody", 180.1)) == {entry for entry in kept.entries if entry[0] == "d"}


ORDER = [0, 1, 2, 3, 4, 5]


def job(name: str, data: str | None = None, *, epoch: float = 6.0) -> Job:
    times = replace(ALONE, epoch=epoch)
    return Job(name=name, data=data or name, num_samples=6, batch_size=2, times=times)


def started(slots: int, *jobs: Job) -> Watched:
    """Jobs with the same order in all epochs, which a position takes a second where the epoch takes six."""
    kept = Watched(NextUse(10 * slots))
    for one in jobs:
        kept.join(one, 0.0)
        kept.begin(one.name, ORDER, ORDER, 0.0)
    return kept


def test_what_is_used_later_makes_room_and_what_is_used_last_passes_by():
    kept = started(2, job("a"), job("quick", epoch=3.0))
    assert kept.takes("a", 0)  # again at 6
    assert kept.takes("a", 1, 1.0)  # at 7
    assert not kept.takes("a", 2, 2.0)  # at 8, behind both
    kept.use("quick", 0, 2.0)
    assert kept.offer("quick", 0, 10, 2.0) == (("quick", 0), (("a", 1),))  # at 4.5
    assert set(kept.entries) == {("a", 0), ("quick", 0)}
    tie = started(1, job("a"), job("b"))
    assert [tie.takes(name, 0) for name in "ab"] == [True, False]


def test_what_another_uses_sooner_is_not_the_last():
    kept = started(2, job("a", "d"), job("c", epoch=5.0), job("quick", epoch=3.0))
    assert kept.takes("a", 0)  # at 6, as far as is known
    assert kept.takes("c", 0)  # at 5
    kept.join(job("b", "d"), 1.0)
    kept.begin("b", ORDER, ORDER, 1.0)  # it uses the first sample now
    kept.use("quick", 0, 1.0)
    assert kept.offer("quick", 0, 10, 1.0).evicted == (("c", 0),)


def test_a_sample_that_several_read_stays_for_the_next_of_them():
    kept = started(1, job("a", "d"))
    kept.takes("a", 0)
    kept.join(job("b", "d"), 0.5)
    kept.begin("b", [5, 4, 3, 2, 1, 0], None, 0.5)
    kept.use("b", 5, 0.5)
    assert kept.offer("b", 5, 10, 0.5) == (("d", 5), (("d", 0),))  # a uses 5 at 4, and 0 at 6, b 0 at 5.5
    kept.use("a", 5, 4.0)  # out of turn
    assert kept.entries == {("d", 5): 10}
    assert kept.use("b", 5, 4.1).entry == ("d", 5)


def test_who_leaves_hands_its_samples_to_who_still_reads_them():
    kept = started(4, job("a", "d"), job("b", "d"))
    assert [kept.takes("a", index, float(index)) for index in (0, 1, 2)] == [True] * 3
    assert dict(kept.held) == {"b": 30}  # it is yet to use them
    assert kept.leave("a", 2.0) == ()
    assert dict(kept.held) == {"b": 30}
    assert kept.use("b", 0, 2.0).entry == ("d", 0)
    assert set(kept.leave("b", 3.0)) == {("d", 0), ("d", 1), ("d", 2)}


def test_in_the_last_epoch_what_was_used_leaves():
    kept = started(6, job("a"))
    assert [kept.takes("a", index, float(index)) for index in ORDER] == [True] * 6
    kept.begin("a", ORDER, None, 6.0)
    assert kept.use("a", 0, 6.0) == (("a", 0), (("a", 0),))
    kept.drop(("a", 1))
    assert not kept.takes("a", 1, 7.0)  # nobody uses it again
    assert len(kept.entries) == 4


def test_before_an_order_is_said_nothing_enters_and_one_that_was_not_foretold_frees_what_has_no_use():
    kept = Watched(NextUse(60))
    kept.join(job("a"), 0.0)
    assert not kept.takes("a", 0)
    kept.begin("a", ORDER, ORDER, 0.0)
    assert [kept.takes("a", index, float(index)) for index in ORDER] == [True] * 6
    assert set(kept.begin("a", [0, 1], [2], 6.0)) == {("a", 3), ("a", 4), ("a", 5)}
    assert kept.use("a", 0, 6.0).evicted == (("a", 0),)


def test_larger_samples_push_out_as_much_as_they_need_or_nothing():
    kept = started(3, job("a"), job("quick", epoch=0.6))
    assert [kept.takes("a", index) for index in (0, 1, 2)] == [True] * 3
    kept.use("quick", 0, 0.0)
    assert kept.offer("quick", 0, 31, 0.0) == (None, ())
    assert kept.offer("a", 3, 0, 0.0) == (("a", 3), ())  # an empty sample has room wherever
    kept.drop(("a", 3))
    assert kept.offer("quick", 0, 15, 0.0) == (("quick", 0), (("a", 2), ("a", 1)))
    kept.use("quick", 1, 0.0)
    assert kept.offer("quick", 1, 30, 0.0) == (None, ())  # a's 0 would leave, its own sooner sample not
    assert set(kept.entries) == {("a", 0), ("quick", 0)}
    assert kept.offer("quick", 1, 15, 0.0) == (("quick", 1), (("a", 0),))  # who might have left still may


def test_measured_times_give_way_to_what_was_seen():
    kept = started(1, job("a", epoch=6.0), job("b", epoch=7.0))
    for index in ORDER:
        kept.use("a", index, float(index))
        kept.use("b", index, float(index))
    kept.begin("a", ORDER, ORDER, 60.0)  # ten times as slow as in its warm-up
    kept.begin("b", ORDER, ORDER, 7.0)
    kept.takes("a", 0, 60.0)
    kept.takes("b", 0, 60.0)
    assert set(kept.entries) == {("b", 0)}


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
    some = progress()
    some.begin([0, 1], [1, 2], 2.0)  # an epoch may use some of the samples
    assert [some.next_use(index) for index in range(5)] == [5, 6, 8, NEVER, NEVER]


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


# By share of the samples and whether jobs read the same data: the least hit rate.
TARGETS = {(0.1, False): 0.2, (0.25, False): 0.375, (0.1, True): 0.36, (0.25, True): 0.55}


@pytest.mark.slow
@pytest.mark.parametrize(("share", "same"), TARGETS)
def test_next_use_comes_close_to_the_optimum(share: float, same: bool):
    slots, counts = round(share * 400 * (1 if same else 8)), {"num_samples": 400, "batch_size": 20}
    loads = [
        Load(name=f"job{n}", data=0 if same else n, epochs=6, start=401 * n / 8, seed=n, **counts)
        for n in range(8)
    ]
    run = simulate(loads, Watched(NextUse(slots)))  # every answer is held against the bytes
    assert sum(run.hits) >= 0.98 * optimum(run.keys, slots).sum()
    assert run.hit_rate() >= TARGETS[share, same]
