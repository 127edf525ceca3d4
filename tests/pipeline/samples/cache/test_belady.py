"""The offline optimum: no choice of what to keep hits more."""

from __future__ import annotations

from functools import cache

import pytest
from cache_simulator import optimum
from hypothesis import given, settings
from hypothesis import strategies as st

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
@settings(max_examples=150, deadline=None, derandomize=True)
def test_it_is_the_optimum(keys: list[int], num_slots: int):
    assert optimum(keys, num_slots).sum() == most_hits(keys, num_slots)


@pytest.mark.parametrize(
    ("keys", "num_slots", "hits"),
    [
        ([], 1, ""),
        ([0, 0, 1, 0], 1, "0101"),  # 1 is not admitted
        ([0, 1, 0, 1, 0], 1, "00101"),
        ([0, 1, 2, 0, 1, 2], 2, "000110"),
        ([0, 1, 2, 0, 1, 2], 0, "000000"),
        ([0, 1, 2, 0, 1, 2], 9, "000111"),
    ],
)
def test_which_uses_hit(keys: list[int], num_slots: int, hits: str):
    assert "".join(str(int(hit)) for hit in optimum(keys, num_slots)) == hits
