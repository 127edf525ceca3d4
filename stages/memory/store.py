"""Where frames stay between a forward and its backward: the protocol, and the store that leaves them there.

A pipeline and ``penstock.offload`` speak to every tier by four words, so a tier is one class.
Source: claims A5 and A6 of CN115016937A (idle between forward and backward, so they may leave the device).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor

from ...compression.pool import Frame, Pool


class Store(Protocol):
    """Keeps frames by key; called from the training thread and from the memory thread."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the frames that it keeps now."""
        ...

    def takes_away(self, device: torch.device) -> bool:
        """Whether frames made on ``device`` leave it, so that even one that did not shrink is worth it."""
        ...

    def put(self, key: Hashable, frame: Frame) -> None:
        """Keep ``frame``; the caller's hold on it becomes the store's."""
        ...

    def fetch(self, key: Hashable) -> None:
        """Begin to bring a frame back."""
        ...

    def get(self, key: Hashable) -> Frame:
        """The frame, on the device of what was packed; the store keeps it."""
        ...

    def drop(self, key: Hashable) -> None:
        """Forget a frame, or nothing."""
        ...


class PackedStore:
    """Frames stay in the memory that they were packed in."""

    def __init__(self) -> None:
        """Start empty."""
        self._frames: dict[Hashable, Frame] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the frames that it keeps now."""
        return sum(frame.num_bytes for frame in list(self._frames.values()))

    def takes_away(self, device: torch.device) -> bool:
        """Never."""
        return False

    def put(self, key: Hashable, frame: Frame) -> None:
        """Keep ``frame``."""
        self._frames[key] = frame

    def fetch(self, key: Hashable) -> None:
        """Nothing to do: it never left."""

    def get(self, key: Hashable) -> Frame:
        """The frame itself."""
        return self._frames[key]

    def drop(self, key: Hashable) -> None:
        """Let go of a frame, if it is kept."""
        frame = self._frames.pop(key, None)
        if frame is not None:
            frame.release()


class Fresh(Pool):
    """A pool that keeps nothing: every buffer is new and freed with its frame.

    For frames whose end nobody announces: a graph may be freed by the garbage collector, in any thread, where
    the lock of a pool could be held already.
    """

    def take(self, num_bytes: int) -> Tensor:
        """A new buffer of exactly ``num_bytes`` bytes."""
        storage = torch.UntypedStorage(num_bytes)  # torch.empty would fill it under deterministic algorithms
        return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (num_bytes,), (1,))

    def give(self, buffer: Tensor) -> None:
        """Nothing: the buffer is freed when nobody holds it."""
