"""One allocation for buffers whose order of coming and going repeats itself from step to step.

The first step is noted down; from the second on a buffer is a view of the one allocation, at the offset that
``place`` gave it by its lifetime. What comes in another size or order than noted, or where the place is still
lent, gets a buffer of a pool instead, and is counted. What was repeated often enough is the next plan.
Source: steps S3 and S4 of the resource management of distributed deep learning.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...compression.pool import Pool, size_class
from .arena import place

_STEADY = 8  # steps that are alike, but not as planned, are the next plan
_WORK = 200_000_000  # of the search for a placement: a part of a second, once


class _Taken(NamedTuple):
    """One buffer of a step: when it came and went, in takes and gives, and its bytes."""

    lower: int
    upper: int
    size: int


class Arena(Pool):
    """A pool that lays what a step takes into one allocation. One thread takes, any gives."""

    def __init__(self) -> None:
        """Start without memory: the first step has buffers of its own."""
        super().__init__()
        self.num_planned, self.num_deviating = 0, 0
        self._plan: list[_Taken] = []
        self._views: list[Tensor | None] = []
        self._places: list[tuple[int, int]] = []
        self._at: dict[int, tuple[int, int]] = {}  # what is lent of the allocation, by the view's identity
        self._old: dict[int, tuple[int, int]] = {}  # of an allocation before that
        self._before: list[_Taken] = []
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

    def _lay(self, step: list[_Taken]) -> None:
        """One allocation for what came and went within the step; the rest has buffers of the pool."""
        self._idle.clear()
        self._sizes = list(self._lent.values())
        inside = [number for number, taken in enumerate(step) if taken.upper]
        offsets = place([step[number] for number in inside], work=_WORK)
        self._old |= self._at
        self._at = {}
        self._plan, self._views, self._places = step, [None] * len(step), [(0, 0)] * len(step)
        if inside:
            sizes = [step[number].size for number in inside]
            whole = self._new(max(map(int.__add__, offsets, sizes)))
            for number, start, size in zip(inside, offsets, sizes, strict=True):
                self._views[number] = whole[start : start + size]
                self._places[number] = start, start + size


def _lifetimes(events: list[tuple[int, int]]) -> list[_Taken]:
    """What was taken, in that order; ``upper`` is 0 where it did not come back within the step."""
    found: list[_Taken] = []
    lent: dict[int, int] = {}
    for time, (identity, size) in enumerate(events, start=1):
        if size >= 0:
            lent[identity] = len(found)
            found.append(_Taken(time, 0, size))
        elif (number := lent.pop(identity, None)) is not None:
            found[number] = found[number]._replace(upper=time)
    return found
