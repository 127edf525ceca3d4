"""The extents of a file: aligned, apart from each other, the smallest that fits, and merged again."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.stages.memory.extents import UNIT, Extents, aligned


def of(*pieces) -> Any:
    extents = Extents()
    extents.grow(sum(pieces) * UNIT)
    return extents, [extents.take(piece * UNIT) for piece in pieces]


def test_lengths_are_whole_units():
    assert [aligned(n) for n in (0, 1, UNIT, UNIT + 1)] == [0, UNIT, UNIT, 2 * UNIT]


def test_the_smallest_room_that_fits_is_taken():
    extents, (first, _, third, _) = of(4, 1, 2, 1)
    extents.give(first)
    extents.give(third)
    assert extents.take(2 * UNIT) == third
    assert extents.take(UNIT) == first
    assert extents.take(4 * UNIT) is None
    assert extents.take(3 * UNIT) == first + UNIT


def test_a_file_that_grows_joins_its_free_end():
    extents, (_, last) = of(1, 2)
    assert extents.tail == 0
    extents.give(last)
    assert extents.tail == 2 * UNIT
    extents.grow(UNIT)
    assert (extents.tail, extents.size) == (3 * UNIT, 4 * UNIT)
    assert extents.take(3 * UNIT) == UNIT


@given(st.lists(st.tuples(st.integers(0, 5 * UNIT), st.integers(0, 30)), max_size=60))
def test_lent_extents_never_meet_and_all_room_comes_back(orders):
    extents, lent = Extents(), {}
    extents.grow(24 * UNIT)
    for num_bytes, other in orders:
        start = extents.take(num_bytes)
        if start is None:
            free = 24 - sum(aligned(n) // UNIT for n in lent.values())
            used = {unit for s, n in lent.items() for unit in range(s // UNIT, (s + aligned(n)) // UNIT)}
            runs = "".join("x" if unit in used else "." for unit in range(24)).split("x")
            assert max(map(len, runs)) * UNIT < aligned(num_bytes) <= 24 * UNIT or free == 0
        elif num_bytes:
            assert start % UNIT == 0
            assert 0 <= start <= 24 * UNIT - aligned(num_bytes)
            for s, n in lent.items():
                assert start + aligned(num_bytes) <= s or s + aligned(n) <= start
            lent[start] = num_bytes
        if lent and other % 2:
            start = sorted(lent)[other % len(lent)]
            extents.give(start)
            del lent[start]
        assert extents.lent_bytes == sum(map(aligned, lent.values()))
    for start in lent:  # in the order in which they were lent: each is one room with its neighbours
        extents.give(start)
    assert extents.take(24 * UNIT) == 0
