"""The policy ``gain``, step by step, on cases small enough to be worked out by hand."""

from dataclasses import replace

from brokers import ALONE, Watched

from penstock.pipeline.data.cache.gain import Gain, Space, cached_per_batch, gains
from penstock.pipeline.data.cache.policy import Job

FIRST, SECOND = [0, 1, 2, 3], [3, 1, 0, 2]  # batches of the second epoch: {3, 1} and {0, 2}


def job(name: str, *, epoch: float | None = 10.0, **times: float) -> Job:
    """Four samples in batches of two; reading one takes a second, and none of it is hidden: E_i = 2."""
    told = None if epoch is None else replace(ALONE, epoch=epoch, **times)
    return Job(name=name, data=name, num_samples=4, batch_size=2, times=told)


def gain(slots: float, *jobs: Job, last_gain: int = 1) -> tuple[Watched, Gain]:
    """A cache of so many slots of 10 bytes, and jobs in their first epoch."""
    policy = Gain(int(10 * slots), last_gain=last_gain)
    kept = Watched(policy)
    for one in jobs:
        kept.join(one, 0.0)
    for one in jobs:
        kept.begin(one.name, FIRST, SECOND, 0.0)
    return kept, policy


def fill(kept: Watched, name: str, indices: list[int] = FIRST) -> None:
    assert all(kept.takes(name, index) for index in indices)


def state(policy: Gain, name: str) -> tuple[int, int, dict[int, int]]:
    """Slots of the pool, idle slots of a job, and its counters."""
    space = policy.spaces[name]
    return policy.pool // 10, space.idle // 10, {b: n for b, n in space.counts.items() if n}


# S11 - S13


def test_s11_nothing_is_cached_in_the_warm_up_epoch():
    kept, policy = gain(4, job("a", epoch=None))
    assert [kept.takes("a", index) for index in FIRST] == [False] * 4
    assert policy.pool == 40
    kept.join(job("a"), 1.0)  # its times are known now
    kept.begin("a", SECOND, FIRST, 1.0)
    assert kept.takes("a", 3)
    kept.join(job("a", epoch=None), 2.0)
    assert not kept.takes("a", 1)


def test_s13_jobs_ascend_by_epoch_and_gain_falls():
    jobs = [job("slow", epoch=8.0), job("fast", epoch=1.0), job("new", epoch=None), job("middle", epoch=3.0)]
    assert list(gains(jobs).items()) == [("fast", 8), ("middle", 3), ("slow", 1)]
    assert gains(jobs, last_gain=0) == {"fast": 8, "middle": 3, "slow": 0}
    assert gains(jobs[1:2], last_gain=0) == {"fast": 1}  # it has nobody to ask
    assert gains([]) == {}


def test_s13_the_list_is_sorted_anew_when_jobs_come_go_and_are_measured():
    kept, policy = gain(4, job("a", epoch=4.0), job("b", epoch=2.0))
    assert (policy.spaces["a"].gain, policy.spaces["b"].gain) == (1, 2)
    kept.join(job("c", epoch=12.0), 0.0)
    assert [policy.spaces[name].gain for name in "abc"] == [3, 6, 1]
    kept.join(job("b", epoch=12.0), 0.0)
    assert [policy.spaces[name].gain for name in "abc"] == [3, 1, 1]
    kept.leave("c", 0.0)
    kept.leave("b", 0.0)
    assert policy.spaces["a"].gain == 1


# S21, S22


def test_s21_a_batch_is_due_its_share_of_the_slots_counted_by_the_mean_size():
    space = Space(job("a"))
    assert space.due(20.0) == 2.0  # no size is known: all that a batch has
    space.see(5)
    space.see(15)
    assert [space.due(10.0 * slots) for slots in (0, 1, 2, 4, 9)] == [0.0, 0.5, 1.0, 2.0, 2.0]


def test_s22_reading_is_to_hide_behind_the_rest():
    for batch_io, hidden, sample_io, desired in (
        (2.0, 0.0, 1.0, 2),
        (2.0, 1.0, 1.0, 1),
        (2.0, 0.9, 1.0, 2),  # 1.1 samples too many are 2
        (0.8, 0.7, 0.1, 1),  # in floats a little above 1
        (2.0, 2.0, 1.0, 0),
        (2.0, 9.0, 1.0, 0),
        (9.0, 0.0, 1.0, 2),  # no more than the batch
        (2.0, 0.0, 0.0, 2),
        (0.0, 0.0, 0.0, 0),
    ):
        times = {"batch_io": batch_io, "hidden": hidden, "sample_io": sample_io}
        assert cached_per_batch(job("a", **times)) == desired, times
    assert cached_per_batch(job("a", epoch=None)) == 2


# S31 - S34


def test_s31_all_is_the_pool_at_first_and_what_is_idle_is_when_the_halves_turn():
    kept, policy = gain(4, job("a", epoch=1.0), job("b", epoch=3.0))
    assert policy.pool == 40
    assert kept.takes("a", 0)
    assert state(policy, "a") == (1, 2, {3: 1})  # a gain of 3: one slot is used, two are idle
    kept.use("a", 1, 0.0)
    kept.use("a", 2, 0.0)
    kept.use("a", 3, 0.0)
    assert kept.begin("a", SECOND, FIRST, 1.0) == ()
    assert state(policy, "a") == (3, 0, {})
    assert policy.spaces["a"].current == {0: 10}


def test_s32_s34_counters_are_those_of_the_batches_of_the_next_order():
    kept, policy = gain(4, job("a"))
    fill(kept, "a")
    assert policy.spaces["a"].counts == {2: 2, 3: 2}  # two batches an epoch, counted on
    kept.begin("a", SECOND, FIRST, 1.0)
    assert policy.spaces["a"].counts == {}
    assert kept.use("a", 3, 1.0).entry == ("a", 3)
    assert policy.spaces["a"].counts == {5: 1}  # 3 is in the second batch of the epoch after


def test_s33_a_hit_gives_its_slot_to_the_pool_or_enters_the_other_half():
    for following, freed in ((None, (("a", 0),)), (FIRST, ())):
        kept, policy = gain(1, job("a"))
        assert [kept.takes("a", index) for index in FIRST] == [True, False, False, False]
        kept.begin("a", SECOND, following, 1.0)
        assert policy.pool == 0
        assert kept.use("a", 3, 1.0) == (None, ())
        assert kept.use("a", 0, 1.0) == (("a", 0), freed)
        assert policy.pool == (10 if freed else 0)
        assert (policy.spaces["a"].current, policy.spaces["a"].following) == ({}, {} if freed else {0: 10})


# S35 - S37


def test_s35_a_request_is_given_what_the_pool_still_has_and_with_an_empty_one_an_own_idle_slot():
    kept, policy = gain(2.5, job("a", epoch=1.0), job("b", epoch=4.0))
    fill(kept, "a", [0])
    assert (policy.pool, policy.spaces["a"].idle) == (0, 15)  # of the 40 bytes that it may have
    kept, policy = gain(3, job("a", epoch=1.0), job("b", epoch=4.0))
    fill(kept, "a", [0])
    assert state(policy, "a") == (0, 2, {3: 1})
    fill(kept, "a", [1])
    assert state(policy, "a") == (0, 1, {2: 1, 3: 1})
    kept.join(job("a", epoch=1.0, hidden=1.0), 0.0)  # E = 1 now
    assert not kept.takes("a", 2)


def test_s36_without_a_slot_a_batch_gets_what_it_is_due_at_most():
    kept, policy = gain(4, job("a", epoch=1.0), job("b", epoch=1.0))  # a part of 2 slots: s = 1
    assert [kept.takes("a", index) for index in (0, 1, 2)] == [True] * 3
    assert kept.takes("b", 0)
    assert policy.pool == 0
    assert not kept.takes("b", 2)  # its batch has one
    assert kept.takes("b", 1)  # this has none, and a has a slot to give
    assert state(policy, "b") == (0, 0, {2: 1, 3: 1})


def test_s11_a_share_is_the_part_of_a_job_and_the_others_have_the_rest():
    a, b, c = (job(name, epoch=1.0) for name in "abc")
    kept, policy = gain(8, replace(a, share=0.5), b, c)
    assert [policy._part(space.job) for space in policy.spaces.values()] == [40.0, 20.0, 20.0]
    kept.leave("c", 0.0)
    assert policy._part(b) == 40.0
    kept, _ = gain(4, replace(a, share=0.75), b)
    assert [kept.takes("a", index) for index in (0, 1, 2)] == [True] * 3
    assert kept.takes("b", 0)
    assert not kept.takes("b", 2)  # its batch has one, and half of one is due


def test_s37_a_neighbour_without_one_gives_a_random_sample_and_its_batch_counts_less():
    kept, policy = gain(4, job("a"), job("b"))  # s = 1 for both
    fill(kept, "a")
    assert state(policy, "a") == (0, 0, {2: 2, 3: 2})
    assert kept.use("b", 0, 0.0).entry is None
    admitted = kept.offer("b", 0, 10, 0.0)
    assert admitted.entry == ("b", 0)
    ((name, lost),) = admitted.evicted
    assert name == "a"
    batch = 2 if lost in (3, 1) else 3
    assert state(policy, "a")[2] == {2: 2, 3: 2} | {batch: 1}
    assert state(policy, "b") == (0, 0, {3: 1})


def test_s37_a_neighbour_gives_as_many_samples_as_it_takes_and_none_for_nothing():
    kept, policy = gain(4, job("a"), job("b"))
    fill(kept, "a")
    assert not kept.takes("b", 0, num_bytes=50)  # more than it has: nothing leaves
    assert len(kept.entries) == 4
    kept.use("b", 1, 0.0)
    assert len(kept.offer("b", 1, 15, 0.0).evicted) == 2
    assert policy.spaces["a"].idle == 5


def test_s37_the_neighbour_is_the_one_before():
    kept, _ = gain(3, job("a", epoch=1.0), job("b", epoch=1.1), job("c", epoch=1.2))  # s = 0.5
    assert [kept.takes(name, 0) for name in "abc"] == [True] * 3
    kept.use("b", 1, 0.0)
    assert kept.offer("b", 1, 10, 0.0).evicted == (("a", 0),)
    kept.use("a", 1, 0.0)
    assert kept.offer("a", 1, 10, 0.0) == (None, ())


def test_s37_the_last_with_a_gain_of_0_asks_its_neighbour_only():
    kept, policy = gain(4, job("a", epoch=1.0), job("b", epoch=4.0), last_gain=0)
    assert not kept.takes("b", 0)  # a has nothing, and the pool is not for it
    assert policy.pool == 40
    assert kept.takes("a", 0)
    assert kept.takes("b", 1)
    assert state(policy, "a") == (0, 2, {3: 1})


# S38 and step 4


def test_s38_in_the_last_epoch_nothing_enters_and_what_is_used_is_for_others():
    kept, policy = gain(2, job("a"), job("b"))
    fill(kept, "a", [0, 1])
    kept.begin("a", SECOND, None, 1.0)
    assert not kept.takes("a", 3)
    assert kept.use("a", 1, 1.0).evicted == (("a", 1),)
    assert kept.takes("b", 0)
    assert set(kept.entries) == {("a", 0), ("b", 0)}
    assert kept.leave("a", 2.0) == (("a", 0),)
    assert policy.pool == 10


def test_what_was_not_used_leaves_when_the_halves_turn_and_what_was_not_foretold_too():
    kept, policy = gain(4, job("a"))
    fill(kept, "a")
    assert kept.begin("a", [3, 1], [0, 1, 2, 3], 1.0) == ()  # 0 and 2 are for the epoch after, as it says now
    assert set(kept.begin("a", [0, 1], None, 2.0)) == {("a", index) for index in FIRST}
    assert policy.pool == 40


def test_a_sample_of_the_next_half_may_be_dropped_or_found_again():
    kept, policy = gain(4, job("a"))
    kept.takes("a", 0)
    assert kept.use("a", 0, 0.0) == (("a", 0), ())
    assert kept.offer("a", 0, 10, 0.0) == (("a", 0), ())
    kept.drop(("a", 0))
    kept.drop(("a", 0))
    kept.drop(("z", 0))
    assert state(policy, "a") == (3, 1, {})


def test_a_compute_bound_job_has_no_slots():
    kept, policy = gain(4, job("a"), job("b", hidden=2.0))
    assert [kept.takes("b", index) for index in FIRST[:2]] == [False] * 2
    fill(kept, "a")
    assert policy.pool == 0
    assert [kept.takes("b", index) for index in FIRST[2:]] == [False] * 2  # nor of its neighbour's
