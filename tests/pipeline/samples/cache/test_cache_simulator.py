"""Jobs at one cache, simulated: what is known by hand, by closed forms, and by the offline optimum."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from math import inf

import cache_simulator as closed_forms
import pytest
from cache_simulator import CONTESTANTS, Load, NeverEvict, Simulated, TokenBucket, optimum, simulate
from kept import Kept

from penstock import ConfigError
from penstock.pipeline.samples.cache.gain import Gain
from penstock.pipeline.samples.cache.next_use import NextUse
from penstock.pipeline.samples.cache.policies import POLICIES
from penstock.pipeline.samples.cache.policy import Found, Job, Policy

pytestmark = pytest.mark.slow

ONE = Load(name="a", num_samples=6, batch_size=3, epochs=2, training=2.0, sample_bytes=10)


# Storage


def test_storage_grants_its_rate_to_all_who_read():
    storage = TokenBucket(10.0)
    assert [storage.read(10, 0.0), storage.read(5, 0.0), storage.read(5, 4.0)] == [1.0, 1.5, 4.5]


def test_latencies_pass_at_once_and_what_nobody_asked_for_adds_up_to_the_burst():
    storage = TokenBucket(10.0, latency=0.5, burst=20.0)
    assert [storage.read(10, 0.0), storage.read(20, 0.0)] == [0.5, 1.5]
    assert [storage.read(20, 9.0), storage.read(10, 9.0)] == [9.5, 10.5]
    assert TokenBucket(latency=0.5).read(10**9, 1.0) == 1.5


@pytest.mark.parametrize("given", [{"rate": 0}, {"rate": inf, "latency": -1}, {"burst": -1}])
def test_storage_that_gives_nothing_is_refused(given: dict[str, float]):
    with pytest.raises(ConfigError, match="storage needs a rate above 0"):
        TokenBucket(**given)


# One job, by hand: a batch takes 3 s to read, and 2 s to train


def test_without_lookahead_training_waits_for_every_read():
    found = simulate([ONE], CONTESTANTS["never_evict"](0), storage=TokenBucket(10.0)).jobs["a"]
    assert (found.seconds, found.computing, found.stalled, found.loads) == (20.0, 8.0, 12.0, 12)
    assert (found.utilisation, found.stall_share) == (0.4, 0.6)
    assert (found.bytes_loaded, found.reading) == (120, 12.0)


def test_with_lookahead_reading_hides_behind_training():
    load = replace(ONE, training=4.0, epochs=1, num_samples=12)
    runs = [
        simulate([load], CONTESTANTS["never_evict"](0), storage=TokenBucket(10.0), lookahead=ahead).jobs["a"]
        for ahead in (0, 1, 2)
    ]
    assert [run.seconds for run in runs] == [28.0, 19.0, 19.0]  # 3 s to read the first, then only training
    assert [run.stalled for run in runs] == [12.0, 3.0, 3.0]
    # What lies ahead helps where reads are uneven: the first two are hits, the others are read meanwhile.
    uneven = {
        ahead: simulate(
            [replace(load, training=2.0)], _First(6), storage=TokenBucket(10.0), lookahead=ahead
        ).jobs["a"]
        for ahead in (1, 2, 3)
    }
    assert {ahead: run.seconds for ahead, run in uneven.items()} == {1: 10.0, 2: 8.0, 3: 8.0}


class _First(NeverEvict):
    """Hits the first so many uses."""

    def __init__(self, hits: int) -> None:
        super().__init__(0)
        self.left = hits

    def use(self, name: str, index: int, now: float) -> Found:
        self.left -= 1
        return Found((name, index) if self.left >= 0 else None)


def test_augmentation_is_no_stall_and_hides_behind_training_with_lookahead():
    load = replace(ONE, augmentation=1.0, epochs=1)
    alone = simulate([load], CONTESTANTS["never_evict"](0), storage=TokenBucket(10.0)).jobs["a"]
    ahead = simulate([load], CONTESTANTS["never_evict"](0), storage=TokenBucket(10.0), lookahead=1).jobs["a"]
    assert (alone.seconds, alone.stalled) == (12.0, 6.0)
    assert (ahead.seconds, ahead.stalled) == (10.0, 6.0)  # 4, train until 6, read until 8, train


def test_the_warm_up_epoch_tells_what_the_source_asks_for():
    told: list[Job] = []

    class Listens(NextUse):
        def join(self, job: Job, now: float) -> None:
            told.append(job)
            super().join(job, now)

    load = replace(ONE, augmentation=0.5, error=1.1)
    for warm_up, lookahead in ((True, 0), (False, 0), (False, 1)):
        simulate([load], Listens(0), storage=TokenBucket(10.0), lookahead=lookahead, warm_up=warm_up)
    first, *others = told
    assert first.times is None
    for job, hidden, epoch in zip(others, (0.0, 0.0, 1.5), (11.0, 11.0, 9.0), strict=True):
        times = job.times
        assert times is not None
        assert (times.batch_io, times.sample_io, times.augmentation, times.training) == (3.0, 1.0, 0.5, 2.0)
        assert (times.hidden, times.epoch) == (hidden, pytest.approx(1.1 * epoch))


def test_what_lies_in_the_cache_is_not_loaded_and_two_on_one_data_set_read_it_once():
    loads = [replace(ONE, name=name, data="d", epochs=3) for name in "ab"]
    found = simulate(loads, Kept(CONTESTANTS["never_evict"](60)), storage=TokenBucket(1000.0))
    assert sum(job.loads for job in found.jobs.values()) <= 8  # 6, and what both read at the same time
    assert found.hit_rate() == 1.0
    own = simulate([replace(ONE, data=None), replace(ONE, name="b")], Kept(CONTESTANTS["never_evict"](120)))
    assert [job.loads for job in own.jobs.values()] == [6, 6]
    assert (own.hit_rate(), own.hits, own.makespan) == (1.0, 12, 8.0)


def test_sizes_belong_to_the_data():
    load = replace(ONE, num_samples=4000, sample_bytes=1000, spread=0.5)
    sizes = load.sizes(1)
    assert sizes.mean() == pytest.approx(1000, rel=0.05)
    assert sizes.std() > 300
    assert (replace(load, name="b", data="a").sizes(1) == sizes).all()
    assert (replace(load, name="b").sizes(1) != sizes).any()
    assert sorted(load.order(0, 0) or []) == list(range(4000))
    assert load.order(0, 0) != load.order(1, 0)
    assert load.order(2, 0) is None


@pytest.mark.parametrize("wrong", [{"num_samples": 0}, {"epochs": 0}, {"training": -1.0}, {"start": -1.0}])
def test_a_job_that_cannot_be_is_refused(wrong: dict[str, float]):
    with pytest.raises(ConfigError, match="no time below 0"):
        replace(ONE, **wrong)


def test_jobs_have_names_of_their_own():
    with pytest.raises(ConfigError, match="names of their own"):
        simulate([ONE, ONE], CONTESTANTS["lru"](10))


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_seeds_give_the_same_result(name: str):
    drawn = random.Random(5)
    loads = [
        Load(
            name=f"job{number}",
            data="d" if number % 2 else None,
            num_samples=80,
            batch_size=7,
            epochs=4,
            training=drawn.random(),
            augmentation=drawn.random() / 4,
            spread=0.6,
            start=drawn.random() * 9,
        )
        for number in range(5)
    ]

    def run(seed: int) -> Simulated:
        kept = Kept(CONTESTANTS[name](100 * 110_000))  # every answer is held against the bytes
        storage = TokenBucket(20e6, latency=0.002, burst=1e6)
        return simulate(loads, kept, storage=storage, lookahead=2, warm_up=True, seed=seed)

    first, again, other = run(1), run(1), run(2)
    assert first == again
    assert first.trace != other.trace
    assert all(
        0 < job.utilisation <= 1 and job.utilisation + job.stall_share <= 1.001 for job in first.jobs.values()
    )


def test_a_compute_bound_job_gets_no_slots_from_gain():
    loads = [
        replace(ONE, name="bound", num_samples=90, epochs=4, training=30.0),
        replace(ONE, name="waits", num_samples=90, epochs=4, training=0.1),
    ]
    found = simulate(loads, Gain(400), storage=TokenBucket(10.0), lookahead=2)
    assert sum(found.jobs["bound"].hits) == 0
    assert found.jobs["waits"].hit_rate() > 0.3


# Hit rates: closed forms, the optimum, and what never_evict hits. A hit is as slow as a load: all keep pace.


def paced(
    made: Policy, share: float, *, jobs: int, same: bool, num: int, epochs: int = 6, error: float = 0.0
):
    drawn = random.Random(3)
    loads = [
        Load(
            name=f"job{number}",
            data="d" if same else None,
            num_samples=num,
            batch_size=20,
            epochs=epochs,
            training=0.0,
            sample_bytes=1,
            start=num * number / jobs + number / jobs,
            error=1 + drawn.choice((-error, error)),
        )
        for number in range(jobs)
    ]
    return simulate(loads, made, storage=TokenBucket(latency=1e-9), sample_seconds=1.0)


@cache
def rates(share: float, same: bool, num: int, error: float = 0.0) -> dict[str, tuple[float, float]]:
    """Hit rate, and hits by those of the optimum, of eight jobs."""
    slots = round(share * num * (1 if same else 8))
    made = {"never_evict": CONTESTANTS["never_evict"](slots), "next_use": NextUse(slots)}
    made |= {"told": NextUse(slots, watch=False)} if error else {}
    found = {}
    for name, one in made.items():
        run = paced(one, share, jobs=8, same=same, num=num, error=error)
        found[name] = run.hit_rate(), run.hits / optimum(run.trace, slots).sum()
    return found


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_a_job_alone_hits_what_the_closed_forms_say(share: float):
    """Never evict to a sample; LRU and next use within 0.01: they are averages, over 5 epochs of 1,000."""
    found = {
        name: paced(CONTESTANTS[name](round(1000 * share)), share, jobs=1, same=False, num=1000).hit_rate()
        for name in ("never_evict", "static_split", "lru", "next_use")
    }
    assert found["never_evict"] == found["static_split"] == share == closed_forms.never_evict(share)
    assert found["lru"] == pytest.approx(closed_forms.lru(share), abs=0.01)
    assert found["next_use"] <= share  # no policy hits more than what it keeps over the end of an epoch


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_many_jobs_hit_what_the_fluids_say(share: float):
    """Own data within 8 %, the same within 14 %: a fluid has many jobs, no first and no last epoch."""
    own, same = rates(share, False, 400)["next_use"][0], rates(share, True, 400)["next_use"][0]
    assert own == pytest.approx(closed_forms.next_use_own(share), rel=0.08)
    assert same == pytest.approx(closed_forms.next_use_same(share), rel=0.14)
    assert same < closed_forms.next_use_same(share)


def test_the_closed_forms_at_their_ends():
    assert (closed_forms.lru(1.0), closed_forms.next_use_same(1.0)) == (1.0, 1.0)
    assert closed_forms.next_use_same(0.1) == pytest.approx(0.412, abs=1e-3)  # from the research note
    assert closed_forms.next_use_own(0.1) == pytest.approx(0.224, abs=1e-3)


# By share and whether the jobs read the same data: how many times the hits of never_evict.
TARGETS = {(0.1, False): 2.0, (0.25, False): 1.5, (0.1, True): 3.6, (0.25, True): 2.2}


def held(num: int, share: float, same: bool) -> None:
    exact, off = rates(share, same, num), rates(share, same, num, 0.1)
    assert exact["next_use"][0] >= TARGETS[share, same] * exact["never_evict"][0]
    assert min(exact["next_use"][1], off["next_use"][1], off["told"][1]) >= 0.98
    assert max(exact["next_use"][1], off["told"][1]) <= 1.0


@pytest.mark.parametrize(("share", "same"), TARGETS)
def test_next_use_comes_close_to_the_optimum_and_hits_more_than_never_evict(share: float, same: bool):
    held(400, share, same)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "same"), TARGETS)
def test_so_it_does_at_full_size(share: float, same: bool):
    held(2000, share, same)


@pytest.mark.parametrize("same", [False, True])
def test_no_policy_hits_more_than_the_optimum(same: bool):
    for name in POLICIES:
        run = paced(CONTESTANTS[name](60), 0.1, jobs=4, same=same, num=150, epochs=4)
        assert run.hits <= optimum(run.trace, 60).sum()
