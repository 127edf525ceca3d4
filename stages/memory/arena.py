"""One allocation for buffers whose order of coming and going repeats itself from step to step.

The first step is noted down; from the second on a buffer is a view of the one allocation, at the offset that
``place`` gave it by its lifetime. What comes in another size or order than noted, or where the place is still
lent, gets a buffer of a pool instead, and is counted. What was repeated often enough is the next plan.
Source: steps S3, S4 and S6 and claims 4-5 of the resource management of distributed deep learning.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ...compression.buffers import Pool, size_class

_STEADY = 8  # steps that are alike, but not as planned, are the next plan


class Lifetime(NamedTuple):
    """One buffer of a step: when it came and went, ``upper`` exclusive, and its bytes."""

    lower: int
    upper: int
    size: int


def max_live(buffers: Sequence[tuple[int, int, int]]) -> int:
    """The most bytes that are there at once: no placement has fewer."""
    changes = sorted(change for low, up, size in buffers for change in ((low, size), (up, -size)))
    return max(itertools.accumulate(change for _, change in changes), default=0)


def place(buffers: Sequence[tuple[int, int, int]]) -> list[int]:
    """Offsets at which no two buffers overlap in time and in place: the best of two greedy orders.

    Each buffer in turn gets the lowest offset that is free as long as it lives: the largest first, or those
    first that live while most is there. The steps of six networks end within 1 % of ``max_live``.

    Args:    buffers: (lower, upper, size) each, ``upper`` exclusive and above ``lower``.
    Returns: the offsets in the order given, in the unit of the sizes.
    """
    if not buffers:
        return []
    lower, upper, size = np.array(buffers, dtype=np.int64).T
    times, places = np.unique(np.concatenate((lower, upper)), return_inverse=True)
    first, last = places[: len(buffers)], places[len(buffers) :]
    changes = np.zeros(len(times), dtype=np.int64)
    np.add.at(changes, first, size)
    np.add.at(changes, last, -size)
    live = changes.cumsum()
    peak = np.array([live[begin:end].max() for begin, end in zip(first, last, strict=True)])
    orders = np.lexsort((lower, -size)), np.lexsort((lower, lower - upper, -peak))
    found = [_place_greedily(lower, upper, size, order) for order in orders]
    return min(found, key=lambda offsets: (offsets + size).max()).tolist()


def _place_greedily(lower: np.ndarray, upper: np.ndarray, size: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Each in turn at the lowest offset that is free as long as it lives."""
    offsets, is_placed = np.zeros_like(size), np.zeros(len(size), dtype=bool)
    for index in order:
        beside = np.flatnonzero(is_placed & (lower < upper[index]) & (lower[index] < upper))
        beside = beside[np.argsort(offsets[beside], kind="stable")]
        tops = np.maximum.accumulate(np.concatenate(([0], offsets[beside] + size[beside])))
        gaps = offsets[beside] - tops[:-1]  # below each of them; above the last there is always room
        fits = np.append(gaps >= size[index], True)
        offsets[index], is_placed[index] = tops[np.argmax(fits)], True
    return offsets


class Arena(Pool):
    """A pool that lays what a step takes into one allocation. One thread takes, any gives."""

    def __init__(self) -> None:
        """Start without memory: the first step has buffers of its own."""
        super().__init__()
        self.num_planned, self.num_deviating = 0, 0
        self._plan: list[Lifetime] = []
        self._views: list[Tensor | None] = []
        self._places: list[tuple[int, int]] = []
        self._at: dict[int, tuple[int, int]] = {}  # what is lent of the allocation, by the view's identity
        self._old: dict[int, tuple[int, int]] = {}  # of an allocation before that
        self._before: list[Lifetime] = []
        self._repeated, self._number = 0, 0
        self._events: list[tuple[int, int]] = []  # (identity, bytes of a take or -1), in their order

    def take(self, num_bytes: int) -> Tensor:
        """Lend a 1-D uint8 tensor of at least ``num_bytes`` bytes at a multiple of 64, not cleared."""
        size, number = size_class(num_bytes), self._number
        self._number += 1
        buffer = self._planned(number, size)
        if buffer is None:
            self.num_deviating += bool(self._plan)
            buffer = super().take(num_bytes)
        self._events.append((id(buffer), size))
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take back what ``take`` lent, itself and not a part of it."""
        self._events.append((id(buffer), -1))
        if self._at.pop(id(buffer), None) is None and self._old.pop(id(buffer), None) is None:
            super().give(buffer)

    def turn(self) -> None:
        """A step ended: plan by it, if it is the first, or is not as planned for a while."""
        events, self._events, self._number = self._events, [], 0
        step = _lifetimes(events)
        self._repeated = self._repeated + 1 if step == self._before else 1
        self._before = step
        if step and step != self._plan and (not self._plan or self._repeated >= _STEADY):
            self._lay(step)

    def _planned(self, number: int, size: int) -> Tensor | None:
        if number >= len(self._plan) or self._plan[number].size != size:
            return None
        view, (start, end) = self._views[number], self._places[number]
        if view is None or any(low < end and start < high for low, high in list(self._at.values())):
            return None
        self.num_planned += 1
        self._at[id(view)] = start, end
        return view

    def _lay(self, step: list[Lifetime]) -> None:
        """One allocation for what came and went within the step; the rest has buffers of the pool."""
        self._idle.clear()
        self._sizes = list(self._lent.values())
        inside = [number for number, taken in enumerate(step) if taken.upper]
        offsets = place([step[number] for number in inside])
        self._old |= self._at
        self._at = {}
        self._plan, self._views, self._places = step, [None] * len(step), [(0, 0)] * len(step)
        if inside:
            sizes = [step[number].size for number in inside]
            whole = self._new(max(map(int.__add__, offsets, sizes)))
            for number, start, size in zip(inside, offsets, sizes, strict=True):
                self._views[number] = whole[start : start + size]
                self._places[number] = start, start + size


def _lifetimes(events: list[tuple[int, int]]) -> list[Lifetime]:
    """What was taken, in that order; ``upper`` is 0 where it did not come back within the step."""
    found: list[Lifetime] = []
    lent: dict[int, int] = {}
    for time, (identity, size) in enumerate(events, start=1):
        if size >= 0:
            lent[identity] = len(found)
            found.append(Lifetime(time, 0, size))
        elif (number := lent.pop(identity, None)) is not None:
            found[number] = found[number]._replace(upper=time)
    return found
