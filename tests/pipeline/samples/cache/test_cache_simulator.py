"""Jobs at one cache, simulated: what is known by hand, by closed forms, and by the offline optimum."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from math import inf

import cache_simulator as closed_forms
import pytest
from cache_simulator import CONTESTANTS, Load, NeverEvict, Simulated, TokenBucket, optimum, simulate
from hypothesis import given
from hypothesis import strategies as st
from kept import Kept

from penstock import ConfigError
from penstock.pipeline.samples.cache.gain import Gain
from penstock.pipeline.samples.cache.next_use import NextUse
from penstock.pipeline.samples.cache.policies import POLICIES
from penstock.pipeline.samples.cache.policy import Found, Job, Policy

pytestmark = pytest.mark.slow

ONE = Load(name="a", num_samples=6, batch_size=3, epochs=2, training=2.0, sample_bytes=10)
ONCE = replace(ONE, epochs=1)
LONG = replace(ONCE, training=4.0, num_samples=12)


def most_hits(keys: list[int], num_slots: int) -> int:
    """By trying every choice: at each use to keep or not, and who leaves."""

    @cache
    def best(at: int, cached: frozenset[int]) -> int:
        if at == len(keys):
            return 0
        there = cached | {keys[at]}
        kept = [there] if len(there) <= num_slots else [there - {one} for one in there]
        return (keys[at] in cached) + max(best(at + 1, one) for one in kept)

    return best(0, frozenset())


@given(keys=st.lists(st.integers(0, 5), max_size=14), num_slots=st.integers(0, 4))
def test_no_choice_of_what_to_keep_hits_more_than_the_optimum(keys: list[int], num_slots: int):
    assert optimum(keys, num_slots).sum() == most_hits(keys, num_slots)


def test_the_optimum_says_which_uses_hit():
    assert optimum([0, 1, 0, 1, 0], 1).tolist() == [False, False, True, False, True]


@pytest.mark.parametrize(
    ("storage", "reads", "ends"),
    [
        ({"rate": 10.0}, [(10, 0.0), (5, 0.0), (5, 4.0)], [1.0, 1.5, 4.5]),  # all who read share its rate
        ({"rate": 10.0, "latency": 0.5, "burst": 20.0}, [(10, 0.0), (20, 0.0)], [0.5, 1.5]),
        ({"rate": 10.0, "latency": 0.5, "burst": 20.0}, [(30, 0.0), (20, 9.0), (10, 9.0)], [1.5, 9.5, 10.5]),
        ({"latency": 0.5}, [(10**9, 1.0)], [1.5]),
    ],
)
def test_storage_grants_its_rate_and_what_nobody_asked_for(storage, reads, ends):
    made = TokenBucket(**storage)
    assert [made.read(num_bytes, now) for num_bytes, now in reads] == ends


class First(NeverEvict):
    """Hits the first six uses."""

    left = 6

    def use(self, name: str, index: int, now: float) -> Found:
        self.left -= 1
        return Found((name, index) if self.left >= 0 else None)


@pytest.mark.parametrize(
    ("load", "ahead", "policy", "seconds", "stalled"),
    [
        (ONE, 0, NeverEvict, 20.0, 12.0),  # a batch takes 3 s to read, and 2 s to train
        (LONG, 0, NeverEvict, 28.0, 12.0),
        (LONG, 1, NeverEvict, 19.0, 3.0),  # 3 s to read the first, then only training
        (LONG, 2, NeverEvict, 19.0, 3.0),
        (replace(LONG, training=2.0), 1, First, 10.0, 2.0),  # reads are uneven: two batches ahead hide more
        (replace(LONG, training=2.0), 2, First, 8.0, 0.0),
        (replace(ONCE, augmentation=1.0), 0, NeverEvict, 12.0, 6.0),  # which is no stall
        (replace(ONCE, augmentation=1.0), 1, NeverEvict, 10.0, 6.0),  # 4, train until 6, read until 8, train
    ],
)
def test_reading_hides_behind_training_as_far_as_a_job_looks_ahead(load, ahead, policy, seconds, stalled):
    found = simulate([load], policy(0), storage=TokenBucket(10.0), lookahead=ahead).jobs["a"]
    assert (found.seconds, found.stalled) == (seconds, stalled)
    batches = load.epochs * load.num_samples // load.batch_size
    assert (found.computing, found.utilisation) == (batches * load.training, found.computing / seconds)


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


def test_two_jobs_on_one_data_set_read_it_once_and_others_their_own():
    loads = [replace(ONE, name=name, data="d", epochs=3) for name in "ab"]
    found = simulate(loads, Kept(CONTESTANTS["never_evict"](60)), storage=TokenBucket(1000.0))
    assert sum(job.loads for job in found.jobs.values()) <= 8  # 6, and what both read at the same time
    assert found.hit_rate() == 1.0
    own = simulate([ONE, replace(ONE, name="b")], Kept(CONTESTANTS["never_evict"](120)))
    assert [job.loads for job in own.jobs.values()] == [6, 6]
    load = replace(ONE, num_samples=4000, sample_bytes=1000, spread=0.5)
    sizes = load.sizes(1)
    assert (sizes.mean(), sizes.std()) == (pytest.approx(1000, rel=0.05), pytest.approx(533, rel=0.4))
    assert (replace(load, name="b", data="a").sizes(1) == sizes).all()
    assert (replace(load, name="b").sizes(1) != sizes).any()
    assert load.order(0, 0) != load.order(1, 0)
    assert load.order(2, 0) is None


def test_what_cannot_be_simulated_is_refused():
    for make, subject in (
        (lambda: TokenBucket(0), "a rate above 0"),
        (lambda: TokenBucket(inf, latency=-1), "a rate above 0"),
        (lambda: replace(ONE, num_samples=0), "no time below 0"),
        (lambda: replace(ONE, training=-1.0), "no time below 0"),
        (lambda: simulate([ONE, ONE], CONTESTANTS["lru"](10)), "names of their own"),
    ):
        with pytest.raises(ConfigError, match=subject):
            make()


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
