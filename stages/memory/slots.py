"""Slots: one allocation for what comes and goes alike in every step, divided by lifetimes.

A step notes what comes: how many bytes, and between which points of it they are there. The next step has a
slot for each, so that nothing is allocated:

    bytes  | slot 2      |
           |-----+-------|      a slot begins where another one was whose time is over
           | slot 0      | slot 3
           +-------------+--------> layers of the program, or what was taken and given

The lifetimes only say where slots lie. One is free as soon as nothing holds what was in it, and until then
what would lie over it gets memory of its own. So does what is larger than noted; the next step has a slot for
that, too.
"""

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...compression.buffers import Pool, new_bytes, size_class
from ...compression.errors import CodecError
from ...compression.frame import ALIGNMENT
from .byte_budget import Tiers


class Lifetime(NamedTuple):
    """Bytes of a step, and when they come and go, ``upper`` exclusive."""

    lower: int
    upper: int
    size: int


def place(buffers: Sequence[tuple[int, int, int]]) -> list[int]:
    """Offsets at which no two buffers (lower, upper, size) overlap in time and in place, greedily.

    Each buffer in turn gets the lowest offset that is free as long as it lives: in three orders, of which the
    best counts. No order is good for all networks, but each of six has one that takes what lives at once.
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


class Slots:
    """Slots of a rank, taken from any thread."""

    def __init__(self, tiers: Tiers | None = None, *, new: Callable[[int], Tensor] = new_bytes) -> None:
        """Start without memory; ``tiers`` know how large the allocation is, which ``new`` makes."""
        self._tiers, self._new, self._lock = tiers or Tiers(), new, threading.Lock()
        self.num_fetched = self.num_allocated = 0  # what got a slot, or memory of its own
        # by the identity of a storage, or of a slot that returns
        self._held: dict[int, tuple[StorageWeakRef | None, int, int]] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all that was noted; the allocation goes with the last storage in it."""
        with self._lock:
            self._lifetimes: dict[Hashable, Lifetime] = {}
            self._is_placed = True
            self._forget_slots()

    def _forget_slots(self) -> None:
        self._slots: dict[Hashable, tuple[int, int]] = {}
        self._space: np.ndarray | None = None
        self._returning: dict[Hashable, Tensor] = {}
        # what returns from the former allocation is known, but in nobody's way
        for key, (storage, *_) in list(self._held.items()):
            if self._held.pop(key, None) is not None and storage is None:  # others free meanwhile
                self._held[key] = None, 0, 0
        self._tiers.slots_bytes = self._tiers.slots_live_bytes = 0

    def note(self, key: Hashable, lifetime: Lifetime) -> bool:
        """Have a slot for ``key`` from the next ``place`` on; False: there is one of that size."""
        with self._lock:
            noted = self._lifetimes.get(key, lifetime)
            if key in self._lifetimes and noted.size >= lifetime.size:
                return False
            # other steps have it for another while
            lower, upper = min(lifetime.lower, noted.lower), max(lifetime.upper, noted.upper)
            self._lifetimes[key], self._is_placed = Lifetime(lower, upper, lifetime.size), False
            return True

    def place(self) -> None:
        """A step ended: place the slots anew if it noted something."""
        with self._lock:
            if self._is_placed:
                return
            self._is_placed = True
            self._forget_slots()
            lifetimes = list(self._lifetimes.values())
            starts = place(lifetimes)
            ends = [start + one.size for start, one in zip(starts, lifetimes, strict=True)]
            try:
                self._space = self._new(max(ends)).numpy()
            except CodecError:  # there is no memory for it: each has its own
                return
            self._slots = dict(zip(self._lifetimes, zip(starts, ends, strict=True), strict=True))
            self._tiers.slots_bytes, self._tiers.slots_live_bytes = max(ends), max_live(lifetimes)

    def take(self, key: Hashable, lower: int, upper: int, num_bytes: int) -> Tensor | None:
        """Return the slot of ``key`` as ``lend``, for a storage of ``num_bytes`` that is there between two
        layers of the program, ``upper`` exclusive; and take note of it."""
        size = (-(-num_bytes // ALIGNMENT) + 1) * ALIGNMENT  # it begins anywhere behind a multiple of 64
        self.note(key, Lifetime(lower, upper, size))
        return self.lend(key, size)

    def lend(self, key: Hashable, size: int, *, returns: bool = False) -> Tensor | None:
        """Return the slot of ``key``, 1-D uint8, or None: none is free. It is again if it ``returns`` by
        ``free``, else when nothing holds its storage, which it has alone."""
        with self._lock:
            start, end = self._slots.get(key, (0, 0))
            for held, (storage, low, high) in list(self._held.items()) if end else ():
                if low < end and start < high:
                    if storage is None or not storage.expired():
                        end = start
                        break
                    self._held.pop(held, None)
            if end - start < size:
                self.num_allocated += 1
                return None
            self.num_fetched += 1
            slot = self._returning.get(key)
            if slot is None:
                assert self._space is not None, "there are slots"
                slot = torch.from_numpy(self._space[start:end])
            if returns:
                self._returning[key], self._held[id(slot)] = slot, (None, start, end)
            else:
                storage = StorageWeakRef(slot.untyped_storage())
                self._held[storage.cdata] = storage, start, end
            return slot

    def free(self, slot: Tensor) -> bool:
        """Take back what ``returns``, without a lock; False: it is none of these."""
        return self._held.pop(id(slot), None) is not None


class SlotPool(Pool):
    """A pool whose buffers are ``slots``, by their number in a step. One thread takes, any gives.

    Placing them anew costs a new allocation. Texts of any length would have that in many steps, so after the
    first two placements 1, 2, 4 .. 64 steps lie between; till then what has no slot is the pool's."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(new=self._new)
        self._num_placed = self._steps_left = 0
        self._is_outgrown = False
        self._begin()

    def _begin(self) -> None:
        self._numbers, self._clock = itertools.count(), itertools.count()
        self._taken: dict[int, tuple[int, int, int]] = {}  # by identity: number, time and size
        self._returned: list[tuple[int, Lifetime]] = []

    def take(self, num_bytes: int) -> Tensor:
        """Lend a 1-D uint8 tensor of at least ``num_bytes`` bytes at a multiple of 64, not cleared."""
        size, number, time = size_class(num_bytes), next(self._numbers), next(self._clock)
        buffer = self.slots.lend(number, size, returns=True)
        if buffer is None:
            buffer = super().take(num_bytes)
            self._taken[id(buffer)] = number, time, size
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take back what ``take`` lent, itself and not a part of it."""
        time = next(self._clock)
        if self.slots.free(buffer):
            return
        if (taken := self._taken.pop(id(buffer), None)) is not None:
            number, lower, size = taken
            if lower < time:  # else a step ended between
                self._returned.append((number, Lifetime(lower, time, size)))
        super().give(buffer)

    def turn(self) -> None:
        """A step ended: what it took and gave back has slots from now on."""
        returned = self._returned
        self._begin()
        self._is_outgrown |= any([self.slots.note(number, lifetime) for number, lifetime in returned])
        if self._is_outgrown and not self._steps_left:
            self._idle.clear()
            self._sizes = list(self._lent.values())
            self.slots.place()
            self._num_placed, self._is_outgrown = self._num_placed + 1, False
            self._steps_left = (1 << min(self._num_placed, 8)) >> 2
        else:
            self._steps_left -= self._steps_left > 0
