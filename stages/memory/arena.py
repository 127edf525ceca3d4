"""One allocation for buffers whose order of coming and going repeats itself from step to step.

The first step is noted down; from the second on a buffer is a view of the one allocation, at the offset that
``place`` gave it by its lifetime. What comes in another size or order than noted, or where the place is still
lent, gets a buffer of a pool instead, and is counted. What was repeated often enough is the next plan."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from ...compression.buffers import Pool, size_class

_STEADY = 8  # steps that are alike, but not as planned, are the next plan


class Lifetime(NamedTuple):
    """One buffer of a step: when it came and went, ``upper`` exclusive, and its bytes."""

    lower: int
    upper: int
    size: int


def place(buffers: Sequence[tuple[int, int, int]]) -> list[int]:
    """Offsets at which no two buffers overlap in time and in place, greedily.

    Each buffer in turn gets the lowest offset that is free as long as it lives: in three orders, of which the
    best counts. No order is good for all networks, but each of six has one that takes what lives at once.

    Args:    buffers: (lower, upper, size) each, ``upper`` exclusive and above ``lower``.
    Returns: the offsets in the order given, in the unit of the sizes.
    """
    orders: tuple[Callable[[tuple[int, int, int]], tuple[int, int]], ...] = (
        lambda one: (-one[2], -one[1]),  # the largest first, of one size those that go last
        lambda one: (-one[2], one[0]),  # or those that come first
        lambda one: (-one[1], -one[2]),  # those that go last first
    )
    numbers = range(len(buffers))
    found = [_in_order(buffers, sorted(numbers, key=lambda n, by=by: by(buffers[n]))) for by in orders]
    return min(found, key=lambda at: max((at[n] + buffers[n][2] for n in numbers), default=0))


def _in_order(buffers: Sequence[tuple[int, int, int]], order: Iterable[int]) -> list[int]:
    length = 1 + sum(upper - lower for lower, upper, _ in buffers) // max(1, len(buffers))
    offsets, by_time = [0] * len(buffers), defaultdict[int, set[tuple[int, int, int, int]]](set)
    for index in order:
        lower, upper, size = buffers[index]
        times = [by_time[time] for time in range(lower // length, (upper - 1) // length + 1)]
        start = 0
        for low, high, first, last in sorted(set[tuple[int, int, int, int]]().union(*times)):
            if first < upper and lower < last:
                if low - start >= size:
                    break
                start = max(start, high)
        offsets[index] = start
        for placed in times:  # a buffer is looked at only by those that live near it
            placed.add((start, start + size, lower, upper))
    return offsets


def max_live(buffers: Sequence[tuple[int, int, int]]) -> int:
    """Return the most bytes that are there at once: no placement has fewer."""
    changes = sorted(change for low, up, size in buffers for change in ((low, size), (up, -size)))
    return max(itertools.accumulate(change for _, change in changes), default=0)


class Arena(Pool):
    """A pool that lays what a step takes into one allocation. One thread takes, any gives."""

    def __init__(self) -> None:
        """Start without memory: the first step has buffers of its own."""
        super().__init__()
        self.num_planned, self.num_deviating = 0, 0
        self._plan: list[Lifetime] = []
        self._places: list[
            tuple[Tensor, int, int] | None
        ] = []  # a view from start to end, by number of a take
        self._taken: dict[int, tuple[int, int]] = {}  # places that are lent, by the view's identity
        self._before: list[Lifetime] = []
        self._repeated, self._number = 0, 0
        self._events: list[tuple[int, int]] = []  # (identity, bytes of a take or -1), in their order

    def take(self, num_bytes: int) -> Tensor:
        """Lend a 1-D uint8 tensor of at least ``num_bytes`` bytes at a multiple of 64, not cleared."""
        size, number = size_class(num_bytes), self._number
        self._number += 1
        is_planned = number < len(self._plan) and self._plan[number].size == size
        found = self._places[number] if is_planned else None
        if found is not None:
            buffer, start, end = found
            if not any(low < end and start < high for low, high in list(self._taken.values())):
                self.num_planned += 1
                self._taken[id(buffer)] = start, end
                self._events.append((id(buffer), size))
                return buffer
        self.num_deviating += bool(self._plan)
        buffer = super().take(num_bytes)
        self._events.append((id(buffer), size))
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take back what ``take`` lent, itself and not a part of it."""
        self._events.append((id(buffer), -1))
        if self._taken.pop(id(buffer), None) is None:
            super().give(buffer)

    def turn(self) -> None:
        """A step ended: plan by it, if it is the first, or is not as planned for a while."""
        events, self._events, self._number = self._events, [], 0
        step = _lifetimes(events)
        self._repeated = self._repeated + 1 if step == self._before else 1
        self._before = step
        if step and step != self._plan and (not self._plan or self._repeated >= _STEADY):
            self._lay(step)

    def _lay(self, step: list[Lifetime]) -> None:
        """One allocation for what came and went within the step; the rest has buffers of the pool."""
        self._idle.clear()
        self._sizes = list(self._lent.values())
        self._taken = dict.fromkeys(self._taken, (0, 0))  # of the former allocation, so in nobody's way
        self._plan, self._places = step, [None] * len(step)
        inside = [number for number, taken in enumerate(step) if taken.upper]
        if inside:
            offsets = place([step[number] for number in inside])
            ends = [start + step[number].size for number, start in zip(inside, offsets, strict=True)]
            whole = self._new(max(ends))
            for number, start, end in zip(inside, offsets, ends, strict=True):
                self._places[number] = whole[start:end], start, end


def _lifetimes(events: list[tuple[int, int]]) -> list[Lifetime]:
    """Return what was taken, in that order; ``upper`` is 0 where it did not come back within the step."""
    found: list[Lifetime] = []
    lent: dict[int, int] = {}
    for time, (identity, size) in enumerate(events, start=1):
        if size >= 0:
            lent[identity] = len(found)
            found.append(Lifetime(time, 0, size))
        elif (number := lent.pop(identity, None)) is not None:
            found[number] = found[number]._replace(upper=time)
    return found
