"""Host memory as a tier: frames made on a GPU are copied to pinned memory and back.

On a CPU, host memory is where the tensors are: the frames stay.
Source: claims A6, A9 and A10 of CN115016937A (node to CPU memory and back, packed on the way).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

import torch
from torch import Tensor

from ...compression.pool import Frame, Pool
from ..device import is_gpu
from .store import UNLIMITED, Store, StoreOptions, UnpooledBuffers


class PinnedPool(Pool):
    """Pinned host buffers, which a GPU copies from and to by itself; pinning is slow, so they are kept."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self._lock = threading.RLock()  # a graph that the garbage collector frees gives back in any thread

    def _new(self, size: int) -> Tensor:
        self._sizes.append(size)
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


class HostStore(Store):
    """Frames in host memory; those made on a GPU are copied into pinned buffers, and back when asked for.

    Called inside ``CopyStream.run``, which orders the copies: a buffer is read before it is written again.
    """

    tier = "host"

    def __init__(self, options: StoreOptions = UNLIMITED) -> None:
        """Start empty."""
        super().__init__(options)
        self._pinned, self._unpooled = PinnedPool(), UnpooledBuffers()
        self._devices: dict[Hashable, torch.device] = {}
        self._back: dict[Hashable, Frame] = {}

    def takes_away(self, device: torch.device) -> bool:
        """From a GPU."""
        return is_gpu(device)

    def put(self, key: Hashable, frame: Frame) -> None:
        """Copy a frame from a GPU into a pinned buffer; keep a frame on the CPU as it is."""
        if frame.buffer.is_cuda:
            pinned = self._pinned.take(frame.num_bytes)
            pinned[: frame.num_bytes].copy_(frame.buffer[: frame.num_bytes], non_blocking=True)
            self._devices[key] = frame.buffer.device
            frame.release()
            frame = Frame(pinned, frame.num_bytes, self._pinned)
        super().put(key, frame)

    def fetch(self, key: Hashable) -> None:
        """Begin to copy a frame back to its GPU."""
        if key in self._devices and key not in self._back:
            pinned = self._frames[key]
            buffer = torch.empty(pinned.num_bytes, dtype=torch.uint8, device=self._devices[key])
            buffer.copy_(pinned.buffer[: pinned.num_bytes], non_blocking=True)
            self._back[key] = Frame(buffer, pinned.num_bytes, self._unpooled)

    def get(self, key: Hashable) -> Frame:
        """Return the frame on the device where it was made; the pinned copy stays."""
        self.fetch(key)
        return self._back.pop(key, None) or super().get(key)

    def drop(self, key: Hashable) -> None:
        """Let go of a frame, and of its copy."""
        self._back.pop(key, None)
        self._devices.pop(key, None)
        super().drop(key)
