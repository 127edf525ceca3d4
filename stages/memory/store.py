"""Where frames stay between a forward and its backward: the store that leaves them there, base of all others.

A pipeline and ``penstock.offload`` speak to every tier by its methods, so a tier is one class.
Source: claims A5 and A6 of CN115016937A (idle between forward and backward, so they may leave the device).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...compression.memory import new_bytes
from ...compression.pool import Frame, Pool
from .tiers import Tiers

if TYPE_CHECKING:
    from .disk import Disk


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """What a store is opened with; a store takes what concerns it.

    ``path``: the folder of a tier that keeps files. ``budget``: the most bytes of frames; None: no limit.
    ``disk``: the room on disk that all stores of a rank share; ``tiers``: what counts the bytes of a rank;
    None: each its own."""

    path: Path | None = None
    budget: int | None = None
    disk: Disk | None = None
    tiers: Tiers | None = None


UNLIMITED = StoreOptions()


class Store:
    """Keeps frames by key, in the memory that they were packed in; other tiers derive from it.

    Called from any thread; ``put`` and ``get`` may block. ``tiers``: those of the rank."""

    tier = "packed"

    def __init__(self, options: StoreOptions = UNLIMITED) -> None:
        """Start empty."""
        self._budget, self._frames = options.budget, dict[Hashable, Frame]()
        self._num_bytes: dict[Hashable, int] = {}  # of what was put or admitted
        self.tiers = options.tiers or Tiers()
        self._gauge = self.tiers.named(self.tier)

    @property
    def num_bytes(self) -> int:
        """Bytes of the frames that it keeps or has admitted."""
        return sum(list(self._num_bytes.values()))

    @property
    def is_limited(self) -> bool:
        """Whether there may be no room."""
        return any(gauge.limit is not None for gauge in (self._gauge, *self._gauge.wider))

    def fits(self, num_bytes: int) -> bool:
        """Whether so many bytes more keep to all limits; alone a store takes what the device has no room for,
        as a frame takes less than what it is made of."""
        return all(gauge.fits(num_bytes) for gauge in (self._gauge, *self._gauge.wider))

    def pool(self) -> Pool | None:
        """Where frames for this store are packed best; None: anywhere."""

    def takes_away(self, device: torch.device) -> bool:
        """Whether frames made on ``device`` leave it, so that even one that did not shrink is worth it."""
        return False

    def admit(self, key: Hashable, num_bytes: int) -> bool:
        """Set ``num_bytes`` of the budget aside for a frame that will be put; False: there is no room.

        A frame may wait for the store, and those that wait count too."""
        fits = self._budget is None or self.num_bytes + num_bytes <= self._budget
        fits = fits and self._gauge.fits(num_bytes)
        if fits:
            self._count(key, num_bytes)
        return fits

    def admit_dense(self, key: Hashable, num_bytes: int, device: torch.device) -> bool:
        """The same for a frame of ``device`` that did not shrink, and so is of use only away from it."""
        return self.admit(key, num_bytes)

    def put(self, key: Hashable, frame: Frame) -> None:
        """Keep ``frame``; the caller's hold on it becomes the store's."""
        self._frames[key] = frame
        self._count(key, frame.num_bytes)

    def fetch(self, key: Hashable) -> None:
        """Begin to bring a frame back to where it was packed: it never left."""

    def get(self, key: Hashable) -> Frame:
        """Return the frame, on the device of what was packed; the store keeps it."""
        return self._frames[key]

    def drop(self, key: Hashable) -> None:
        """Forget a frame and what was admitted for it, if there is any."""
        frame = self._frames.pop(key, None)
        self._count(key, None)
        if frame is not None:
            frame.release()

    def _count(self, key: Hashable, num_bytes: int | None) -> None:
        """A frame has so many bytes; None: there is none."""
        before = self._num_bytes.pop(key, 0)
        if num_bytes is not None:
            self._num_bytes[key] = num_bytes
        self._gauge.add((num_bytes or 0) - before)


class UnpooledBuffers(Pool):
    """A pool that keeps nothing: every buffer is new and freed with its frame.

    For frames whose end nobody announces: a graph may be freed by the garbage collector, in any thread, where
    the lock of a pool could be held already.
    """

    def take(self, num_bytes: int) -> Tensor:
        """Return a new buffer of exactly ``num_bytes`` bytes."""
        return new_bytes(num_bytes)

    def give(self, buffer: Tensor) -> None:
        """Do nothing: the buffer is freed when nobody holds it."""
