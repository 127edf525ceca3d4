"""Jobs at one cache, simulated: how close policies come to the offline optimum."""

from functools import cache

import pytest
from cache_simulator import CONTESTANTS, Load, TokenBucket, hit_rate, optimum, simulate
from hypothesis import given
from hypothesis import strategies as st
from small_policies import Watched

from penstock.pipeline.data.cache.policies import POLICIES

pytestmark = pytest.mark.slow


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


def paced(name: str, slots: int, *, jobs: int, same: bool, num: int, seed: int = 0):
    """Jobs that take as long for a hit as for a load, so that all keep their pace."""
    loads = [
        Load(
            name=f"job{number}",
            data="d" if same else None,
            num_samples=num,
            batch_size=20,
            epochs=6,
            training=0.0,
            sample_bytes=1,
            start=num * number / jobs + number / jobs,
            seed=100 * seed + number,
        )
        for number in range(jobs)
    ]
    policy = Watched(CONTESTANTS[name](slots))  # every answer is held against the bytes
    return simulate(loads, policy, storage=TokenBucket(latency=1e-9), sample_seconds=1.0)


# By share of the samples and whether jobs read the same data: the least hit rate.
TARGETS = {(0.1, False): 0.2, (0.25, False): 0.375, (0.1, True): 0.36, (0.25, True): 0.55}


@pytest.mark.parametrize(("share", "same"), TARGETS)
def test_next_use_comes_close_to_the_optimum(share: float, same: bool):
    slots = round(share * 400 * (1 if same else 8))
    run = paced("next_use", slots, jobs=8, same=same, num=400)
    assert run.hits >= 0.98 * optimum(run.trace, slots).sum()
    assert hit_rate(run.jobs.values()) >= TARGETS[share, same]


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_hits_more_than_the_optimum_and_the_same_seeds_give_the_same(name: str, same: bool):
    run, again, other = (paced(name, 60, jobs=4, same=same, num=150, seed=seed) for seed in (1, 1, 2))
    assert run.hits <= optimum(run.trace, 60).sum()
    assert (run.jobs, run.trace) == (again.jobs, again.trace)
    assert run.trace != other.trace
