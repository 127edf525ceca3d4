"""Buffers of a step that repeats itself: one allocation by lifetimes; what deviates has others."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.stages.memory.arena import Arena, max_live, place

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


def test_offsets_of_a_few() -> None:
    assert place([]) == []
    assert place([(0, 1, 5)]) == [0]
    assert place([(0, 1, 5), (1, 2, 5)]) == [0, 0]
    assert place([(0, 2, 5), (1, 3, 7)]) == [7, 0]
    assert max_live([(0, 1, 5), (1, 2, 5), (0, 1, 2)]) == 7


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


class Counted(Arena):
    """Counts the allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.num_new = 0

    def _new(self, size: int) -> Tensor:
        self.num_new += 1
        return super()._new(size)


def run(arena: Arena, step: list[tuple], lent: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Take and give; fills what it takes, and sees that nobody else wrote there."""
    arena.turn()
    lent = {} if lent is None else lent
    for what, name, *pages in step:
        if what == "take":
            lent[name] = arena.take(pages[0] * PAGE)
            assert lent[name].data_ptr() % 64 == 0
            assert lent[name].numel() >= pages[0] * PAGE
            lent[name].fill_(ord(name) % 251)
        else:
            buffer = lent.pop(name)
            assert (buffer == ord(name) % 251).all()
            arena.give(buffer)
    return lent


def test_from_the_second_step_on_one_allocation_holds_all() -> None:
    arena = Counted()
    run(arena, STEP)
    assert (arena.num_new, arena.num_bytes) == (2, 5 * PAGE)  # of the first step
    for count in range(1, 5):
        run(arena, STEP)
        assert (arena.num_planned, arena.num_deviating) == (3 * count, 0)
    assert (arena.num_new, arena.num_bytes) == (3, 5 * PAGE)


def test_a_place_that_is_still_lent_is_not_lent_again() -> None:
    arena = Counted()
    for _ in range(2):
        run(arena, STEP)
    lent = run(arena, STEP[:2])
    lent |= run(arena, [("take", "d", 3), ("take", "e", 2)])
    assert arena.num_deviating == 2
    run(arena, [("give", name) for name in "abde"], lent)
    assert lent == {}


@pytest.mark.slow
def test_what_comes_in_another_size_is_lent_from_a_pool_that_keeps_it() -> None:
    arena = Counted()
    other = [("take", "a", 1), ("take", "b", 2), ("give", "a"), ("give", "b")]
    run(arena, STEP)
    run(arena, other)
    made = arena.num_new
    for step in (STEP, other, STEP, other):
        run(arena, step)
    assert (arena.num_new, arena.num_deviating) == (made, 3)


@pytest.mark.slow
def test_what_stays_over_a_step_has_a_buffer_of_its_own() -> None:
    arena = Counted()
    lent = run(arena, [("take", "x", 2), ("take", "y", 1), ("give", "y")])
    for name, last in ("zx", "xz", "zx"):
        run(arena, [("take", name, 2), ("take", "y", 1), ("give", "y"), ("give", last)], lent)
    assert arena.num_new == 4  # x, y, the allocation for y, z


@pytest.mark.slow
def test_a_step_that_changed_for_good_is_the_next_plan() -> None:
    arena = Counted()
    other = [("take", "a", 7), ("take", "b", 6), ("give", "a"), ("give", "b")]
    lent = run(arena, [("take", "k", 1), *STEP])
    run(arena, [("give", "k"), *STEP], lent)
    for _ in range(9):
        run(arena, other)
    planned, made = arena.num_planned, arena.num_new
    run(arena, other)
    assert (arena.num_planned, arena.num_new) == (planned + 2, made)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_nobody_writes_into_what_another_has(seed: int) -> None:
    chance = random.Random(seed)
    arena, lent = Arena(), dict[str, Tensor]()
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
        run(arena, steps[chance.random() < 0.2], lent)


def test_a_buffer_comes_back_once() -> None:
    arena = Arena()
    for _ in range(2):
        run(arena, STEP)
    arena.turn()
    buffer = arena.take(3 * PAGE)
    arena.give(buffer)
    with pytest.raises(AssertionError, match="comes back once"):
        arena.give(buffer)
