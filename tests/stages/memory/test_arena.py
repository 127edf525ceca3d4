"""Buffers of a step that repeats itself: one allocation by lifetimes; what deviates has others."""

import gc
import itertools
import random
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.pipeline.data.samples import Description
from penstock.pipeline.models import gpt
from penstock.stages.memory.arena import Arena, place

Triple = tuple[int, int, int]


def max_live(buffers: Sequence[Triple]) -> int:
    """The most bytes that are there at once: no placement has fewer."""
    changes = sorted(change for low, up, size in buffers for change in ((low, size), (up, -size)))
    return max(itertools.accumulate(change for _, change in changes), default=0)


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


NETWORKS = ["resnet18", "resnet50", "vgg11_bn", "densenet121", "mobilenet_v3_small", "gpt"]


class Lifetimes(TorchDispatchMode):
    """Notes when each storage that is made inside came and went, in operations."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.known = itertools.count(1), dict[int, list[int]]()
        self.found: list[list[int]] = []

    def _went(self, key: int) -> None:
        self.known.pop(key)[1] = next(self.time)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        out = func(*args, **kwargs or {})
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.known and storage._cdata not in known and storage.nbytes():
                    taken = [next(self.time), 0, storage.nbytes()]
                    self.known[storage._cdata] = taken
                    self.found.append(taken)
                    weakref.finalize(storage, self._went, storage._cdata)
        return out

    def buffers(self) -> list[tuple[int, int, int]]:
        """(lower, upper, size) of each, ``upper`` exclusive."""
        end = next(self.time) + 1
        return [(low, up or end, size) for low, up, size in self.found]


def buffers_of(name: str) -> list[tuple[int, int, int]]:
    """The buffers of a forward and its backward of a network of torchvision, or of ``gpt``."""
    torch.manual_seed(0)
    if name == "gpt":
        text = Description(input_shape=(32,), num_classes=97, vocabulary="".join(map(chr, range(97))))
        model, given = gpt(text, width=64), torch.randint(0, 97, (4, 32))
    else:
        model, given = torchvision.models.get_model(name, weights=None), torch.randn(2, 3, 64, 64)
    gc.collect()
    with Lifetimes() as lifetimes:
        model(given).float().pow(2).mean().backward()
    return lifetimes.buffers()


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_of_a_network_is_laid_close_to_what_lives_at_once(name: str) -> None:
    buffers = buffers_of(name)
    live, high = max_live(buffers), peak(buffers, place(buffers))
    print(
        f"{name}: {len(buffers)} buffers, {live} bytes at once, laid in {high} ({high / live - 1:.3%} more)"
    )
    assert len(buffers) > 100
    assert high <= 1.02 * live
