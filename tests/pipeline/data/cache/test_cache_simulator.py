"""Jobs at one cache, simulated: how close policies come to the offline optimum."""

from functools import cache

import pytest
from cache_simulator import Load, optimum, simulate
from hypothesis import given
from hypothesis import strategies as st
from small_policies import Watched

from penstock.pipeline.data.cache.next_use import NextUse

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


# By share of the samples and whether jobs read the same data: the least hit rate.
TARGETS = {(0.1, False): 0.2, (0.25, False): 0.375, (0.1, True): 0.36, (0.25, True): 0.55}


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
