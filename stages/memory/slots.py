"""Slots for what comes back to memory: one allocation, divided by lifetimes.

A step notes what comes back: how many bytes, and between which layers of the program they are read. The next
step has a slot for each, into which it is fetched, so that what comes back whole allocates nothing:

    bytes  | slot 2      |
           |-----+-------|      a slot is taken from when its storage may be fetched until its last
           | slot 0      | slot 3       reader is done; then the next one begins where it was
           +-------------+--------> layers of the program

The lifetimes only say where slots lie. One is free as soon as nothing holds the storage that was in it, and
until then what would lie over it gets memory of its own. So does what is larger than noted; the next step has
a slot for that, too.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...compression.buffers import new_bytes
from ...compression.errors import CodecError
from ...compression.frame import ALIGNMENT
from .arena import Lifetime, max_live, place
from .byte_budget import Tiers


class Slots:
    """Slots of a rank, taken from any thread.

    Attributes: num_fetched: what came back into a slot; num_allocated: what got memory of its own."""

    def __init__(self, tiers: Tiers) -> None:
        """Start without memory; ``tiers`` know how large the allocation is."""
        self._tiers, self._lock = tiers, threading.Lock()
        self._lifetimes: dict[Hashable, Lifetime] = {}
        self._is_placed = True
        self._slots: dict[Hashable, tuple[int, int]] = {}
        self._space: np.ndarray | None = None
        self._held: list[tuple[StorageWeakRef, int, int]] = []
        self.num_fetched = self.num_allocated = 0

    def place(self) -> None:
        """A step ended: place the slots anew if it noted something."""
        with self._lock:
            if not self._is_placed:
                self._place()

    def clear(self) -> None:
        """Forget all that was noted; the allocation goes with the last storage in it."""
        with self._lock:
            self._lifetimes, self._slots, self._space, self._held = {}, {}, None, []
            self._is_placed = True
            self._tiers.slots_bytes = self._tiers.slots_live_bytes = 0

    def take(self, key: Hashable, lower: int, upper: int, num_bytes: int) -> Tensor | None:
        """Return the slot of ``key``, 1-D uint8 in a storage of its own, or None; and take note of it.

        Args:    key: the same in every step; lower, upper: the layers of the program between which its
                 storage is there, ``upper`` exclusive; num_bytes: of the storage."""
        size = (-(-num_bytes // ALIGNMENT) + 1) * ALIGNMENT  # it begins anywhere behind a multiple of 64
        with self._lock:
            noted = self._lifetimes.get(key)
            if noted is None or noted.size < size:
                self._lifetimes[key], self._is_placed = Lifetime(lower, upper, size), False
            start, end = self._slots.get(key, (0, 0))
            self._held = [one for one in self._held if not one[0].expired()]
            if end - start < size or any(low < end and start < high for _, low, high in self._held):
                self.num_allocated += 1
                return None
            assert self._space is not None, "there are slots"
            slot = torch.from_numpy(self._space[start:end])
            self._held.append((StorageWeakRef(slot.untyped_storage()), start, end))
            self.num_fetched += 1
            return slot

    def _place(self) -> None:
        lifetimes = list(self._lifetimes.values())
        starts = place(lifetimes)
        ends = [start + one.size for start, one in zip(starts, lifetimes, strict=True)]
        self._space, self._slots, self._held = None, {}, []  # the former allocation is in nobody's way
        self._is_placed = True
        self._tiers.slots_bytes = self._tiers.slots_live_bytes = 0
        try:
            self._space = new_bytes(max(ends)).numpy()
        except CodecError:  # there is no memory for it: each has its own
            return
        self._slots = dict(zip(self._lifetimes, zip(starts, ends, strict=True), strict=True))
        self._tiers.slots_bytes, self._tiers.slots_live_bytes = max(ends), max_live(lifetimes)
