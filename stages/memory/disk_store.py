"""The disk as a tier: frames leave the memory for a file of the rank, whatever device they were made on.

Writing goes on beside; a frame that is wanted before it was written is taken from memory, and several that
are wanted soon are read at a time.
Source: claims A5, A6 and A8-A10 of CN115016937A (unload, fetch ahead); claims 2-4 of CN110032450B.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from ...compression.pool import Frame, Pool
from .disk import Disk
from .host_store import PinnedPool
from .room import DiskOptions
from .slab_frame import SlabFrame
from .store import UNLIMITED, Store, StoreOptions, UnpooledBuffers


class DiskStore(Store):
    """Frames on the disk of ``options.disk``, or of one of its own in ``options.path``.

    Those of a GPU pass through pinned memory: called inside ``CopyStream.run``, which orders the copies."""

    tier = "disk"

    def __init__(self, options: StoreOptions = UNLIMITED) -> None:
        """Start empty.

        Raises:  ConfigError: the folder takes no file."""
        super().__init__(options)
        self.disk = options.disk or Disk(DiskOptions(path=options.path), tiers=self.tiers)
        self._kept: dict[Hashable, SlabFrame] = {}
        self._pinned, self._unpooled = PinnedPool(), UnpooledBuffers()
        self._devices: dict[Hashable, torch.device] = {}

    def pool(self) -> Pool:
        """Buffers that begin at a page, of which few wait for the next frame."""
        return self.disk.buffers

    def takes_away(self, device: torch.device) -> bool:
        """From everywhere, while there is room."""
        return self.disk.takes

    def put(self, key: Hashable, frame: Frame) -> None:
        """Begin to write ``frame``; waits while much is to be written, and raises what a write raised."""
        ready = _at_once
        if frame.buffer.is_cuda:
            pinned = self._pinned.take(frame.num_bytes)
            pinned[: frame.num_bytes].copy_(frame.buffer[: frame.num_bytes], non_blocking=True)
            copied = torch.Event(frame.buffer.device)
            copied.record()
            self._devices[key], ready = frame.buffer.device, copied.synchronize
            frame.release()
            frame = Frame(pinned, frame.num_bytes, self._pinned)
        num_bytes = frame.num_bytes
        self._kept[key] = self.disk.write(frame, ready=ready)
        self._count(key, num_bytes)

    def fetch(self, key: Hashable) -> None:
        """Begin to read a frame."""
        if (found := self._kept.get(key)) is not None:
            self.disk.fetch(found, self._pinned if key in self._devices else None)

    def get(self, key: Hashable) -> Frame:
        """Return the frame, on the device where it was made; the one on disk stays.

        Raises:  StageError: it is not what was written, or the disk refuses."""
        kept = self._kept[key]
        self.fetch(key)
        if (device := self._devices.get(key)) is None:
            return self.disk.get(kept)
        pinned = self.disk.get(kept, self._pinned)
        buffer = pinned.bytes.to(device)
        if pinned is not kept.frame:
            pinned.release()
        return Frame(buffer, pinned.num_bytes, self._unpooled)

    def drop(self, key: Hashable) -> None:
        """Forget a frame, and what of it is to be written."""
        self._devices.pop(key, None)
        self._count(key, None)
        if (found := self._kept.pop(key, None)) is not None:
            self.disk.forget(found)


def _at_once() -> None:
    """Wait for nothing: bytes in host memory are there."""
