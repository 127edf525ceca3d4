"""Placement by lifetimes, and buffers of a step that repeats itself in slots; what deviates has others."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.stages.memory.slots import SlotPool, max_live, place

Triple = tuple[int, int, int]


def peak(buffers: Sequence[Triple], offsets: Sequence[int]) -> int:
    """The bytes of the allocation; fails where two buffers overlap in time and in place."""
    assert all(type(offset) is int and offset >= 0 for offset in offsets)
    placed = list(zip(buffers, offsets, strict=True))
    for ((low, up, size), at), ((low_2, up_2, size_2), at_2) in itertools.combinations(placed, 2):
        assert not (low < up_2 and low_2 < up and at < at_2 + size_2 and at_2 < at + size)
    return max((at + size for (_, _, size), at in placed), default=0)


@st.composite
def lifetimes(draw: st.DrawFn, sizes: st.SearchStrategy[int]) -> list[Triple]:
    begins = draw(st.lists(st.integers(-3, 7), max_size=30))
    return [(low, draw(st.integers(low + 1, 9)), draw(sizes)) for low in begins]


@settings(max_examples=100, deadline=None)
@given(lifetimes(st.integers(1, 1 << 40)))
def test_no_two_buffers_overlap(buffers: list[Triple]) -> None:
    assert peak(buffers, place(buffers)) >= max_live(buffers)


@settings(max_examples=100, deadline=None)
@given(lifetimes(st.just(4096)))
def test_buffers_of_one_size_take_what_lives_at_once(buffers: list[Triple]) -> None:
    assert peak(buffers, place(buffers)) == max_live(buffers)


PAGE = 4096
STEP = [("take", "a", 3), ("take", "b", 2), ("give", "a"), ("take", "c", 3), ("give", "b"), ("give", "c")]


class Counted(SlotPool):
    """Counts the allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.num_new = 0

    def _new(self, size: int) -> Tensor:
        self.num_new += 1
        return super()._new(size)


def run(pool: SlotPool, step: list[tuple], lent: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Take and give; fills what it takes, and sees that nobody else wrote there."""
    pool.turn()
    lent = {} if lent is None else lent
    for what, name, *pages in step:
        if what == "take":
            lent[name] = pool.take(pages[0] * PAGE)
            assert lent[name].data_ptr() % 64 == 0
            assert lent[name].numel() >= pages[0] * PAGE
            lent[name].fill_(ord(name) % 251)
        else:
            buffer = lent.pop(name)
            assert (buffer == ord(name) % 251).all()
            pool.give(buffer)
    return lent


def test_from_the_second_step_on_one_allocation_holds_all() -> None:
    pool = Counted()
    run(pool, STEP)
    assert (pool.num_new, pool.num_bytes) == (2, 5 * PAGE)  # of the first step
    for count in range(1, 5):
        run(pool, STEP)
        assert (pool.slots.num_fetched, pool.slots.num_allocated) == (3 * count, 3)
    assert (pool.num_new, pool.num_bytes) == (3, 5 * PAGE)


def test_a_place_that_is_still_lent_is_not_lent_again() -> None:
    pool = Counted()
    for _ in range(2):
        run(pool, STEP)
    lent = run(pool, STEP[:2])
    lent |= run(pool, [("take", "d", 3), ("take", "e", 2)])
    assert (pool.slots.num_fetched, pool.slots.num_allocated) == (3 + 2, 3 + 2)
    run(pool, [("give", name) for name in "abde"], lent)
    assert lent == {}


@pytest.mark.slow
def test_what_is_smaller_than_noted_fits_and_what_is_larger_has_a_slot_in_the_next_step() -> None:
    pool = Counted()
    other = [("take", "a", 1), ("take", "b", 4), ("give", "a"), ("give", "b")]
    run(pool, STEP)
    run(pool, other)  # of three noted, the second is too small
    run(pool, STEP)
    made, others = pool.num_new, pool.slots.num_allocated
    for step in (other, STEP, other, STEP):
        run(pool, step)
    assert (pool.num_new, pool.slots.num_allocated) == (made, others)


@pytest.mark.slow
def test_buffers_that_grow_from_step_to_step_are_placed_anew_ever_less_often() -> None:
    pool, allocations = SlotPool(), list[int]()
    for step in range(100):
        before = pool.slots._space
        pool.give(pool.take(PAGE * (step + 1)))
        pool.turn()
        if pool.slots._space is not before:
            allocations.append(step)
    assert allocations[:4] == [0, 1, 3, 6]
    assert len(allocations) <= 9


def test_what_stays_over_a_step_has_a_buffer_of_its_own() -> None:
    pool = Counted()
    lent = run(pool, [("take", "x", 2), ("take", "y", 1), ("give", "y")])
    for name, last in ("zx", "xz", "zx"):
        run(pool, [("take", name, 2), ("take", "y", 1), ("give", "y"), ("give", last)], lent)
    assert pool.num_new == 4  # x, y, the allocation for y, z


def test_a_slot_that_is_lent_while_slots_are_placed_anew_comes_back() -> None:
    pool = Counted()
    run(pool, STEP)
    lent = run(pool, [("take", "a", 3), ("take", "b", 4), ("give", "b")])  # b is larger than noted
    run(pool, [("give", "a"), *STEP], lent)
    others = pool.slots.num_allocated
    run(pool, STEP)
    assert (lent, pool.slots.num_allocated) == ({}, others)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_nobody_writes_into_what_another_has(seed: int) -> None:
    chance = random.Random(seed)
    pool, lent = SlotPool(), dict[str, Tensor]()
    steps = []
    for _ in range(2):
        free, held, step = list("abcdefgh"), list[str](), []
        for _ in range(chance.randrange(1, 24)):
            names, what = (free, "take") if not held or (free and chance.random() < 0.5) else (held, "give")
            name = names.pop(chance.randrange(len(names)))
            (held if what == "take" else free).append(name)
            step.append((what, name, chance.randrange(1, 5)))
        steps.append([*step, *(("give", name) for name in held)])
    for _ in range(12):
        run(pool, steps[chance.random() < 0.2], lent)


def test_a_buffer_comes_back_once() -> None:
    pool = SlotPool()
    for _ in range(2):
        run(pool, STEP)
    pool.turn()
    buffer = pool.take(3 * PAGE)
    pool.give(buffer)
    with pytest.raises(AssertionError, match="comes back once"):
        pool.give(buffer)
