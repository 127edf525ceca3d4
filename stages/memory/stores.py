"""Stores of frames between a forward and its backward: the tiers ``packed``, ``host`` and ``disk``.

A pipeline and ``penstock.offload`` speak to every tier by the methods of ``Store``, which leaves frames
where they are. On a CPU host memory is where the tensors are, so frames stay; those made on a GPU are copied
to pinned memory and back. Writing to a disk goes on beside; a frame that is wanted before it was written is
taken from memory. Several stores may be one: a frame goes to the first that has room.

A new tier is a class here, one row of the table at the end, and its name in ``TIERS`` of the plan and the
options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ...compression.buffers import Frame, Pool, new_bytes
from ...compression.errors import ConfigError
from ..device import is_gpu
from .byte_budget import Tiers
from .disk import Disk, DiskOptions, SwapEntry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Options that a store is opened with; a store takes what concerns it.

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
        self._counter = self.tiers.named(self.tier)

    @property
    def num_bytes(self) -> int:
        """Bytes of the frames that it keeps or has admitted."""
        return sum(list(self._num_bytes.values()))

    @property
    def is_limited(self) -> bool:
        """Return whether there may be no room."""
        return any(counter.limit is not None for counter in (self._counter, *self._counter.wider))

    def fits(self, num_bytes: int) -> bool:
        """Return whether so many bytes more keep to all limits.

        Alone a store takes what the device has no room for, as a frame takes less than its tensor."""
        return all(counter.fits(num_bytes) for counter in (self._counter, *self._counter.wider))

    def pool(self) -> Pool | None:
        """Return the pool that frames for this store are packed best in; None: any."""

    def offloads_from(self, device: torch.device) -> bool:
        """Return whether frames made on ``device`` leave it, so that one that did not shrink is worth it."""
        return False

    @property
    def takes_pieces(self) -> bool:
        """Return whether a tensor is best put in pieces: all that is put leaves memory."""
        return False

    def admit(self, key: Hashable, num_bytes: int) -> bool:
        """Set ``num_bytes`` of the budget aside for a frame that will be put; False: there is no room.

        A frame may wait for the store, and those that wait count too."""
        fits = self._budget is None or self.num_bytes + num_bytes <= self._budget
        fits = fits and self._counter.fits(num_bytes)
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
        self._counter.add((num_bytes or 0) - before)


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


class PinnedPool(Pool):
    """Pinned host buffers, which a GPU copies from and to by itself; pinning is slow, so they are kept."""

    def copy_of(self, frame: Frame) -> Frame:
        """Return a GPU's frame in a pinned buffer, once the current stream has come there; lets go of it."""
        pinned = self.take(frame.num_bytes)
        pinned[: frame.num_bytes].copy_(frame.bytes, non_blocking=True)
        frame.release()
        return Frame(pinned, frame.num_bytes, self)

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

    def offloads_from(self, device: torch.device) -> bool:
        """From a GPU."""
        return is_gpu(device)

    def put(self, key: Hashable, frame: Frame) -> None:
        """Copy a frame from a GPU into a pinned buffer; keep a frame on the CPU as it is."""
        if frame.buffer.is_cuda:
            self._devices[key] = frame.buffer.device
            frame = self._pinned.copy_of(frame)
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


class DiskStore(Store):
    """Frames on the disk of ``options.disk``, or of one of its own in ``options.path``.

    Those of a GPU pass through pinned memory: called inside ``CopyStream.run``, which orders the copies."""

    tier = "disk"

    def __init__(self, options: StoreOptions = UNLIMITED) -> None:
        """Start empty.

        Raises:  ConfigError: the folder takes no file."""
        super().__init__(options)
        self.disk = options.disk or Disk(DiskOptions(path=options.path), tiers=self.tiers)
        self._kept: dict[Hashable, SwapEntry] = {}
        self._pinned, self._unpooled = PinnedPool(), UnpooledBuffers()
        self._devices: dict[Hashable, torch.device] = {}

    def pool(self) -> Pool:
        """Buffers that begin at a page, of which few wait for the next frame."""
        return self.disk.buffers

    def offloads_from(self, device: torch.device) -> bool:
        """From everywhere, while there is room."""
        return self.disk.takes

    @property
    def takes_pieces(self) -> bool:
        """While there is room."""
        return self.disk.takes

    def put(self, key: Hashable, frame: Frame) -> None:
        """Begin to write ``frame``; waits while much is to be written, and raises what a write raised."""
        ready = None
        if frame.buffer.is_cuda:
            self._devices[key], copied = frame.buffer.device, torch.Event(frame.buffer.device)
            frame, ready = self._pinned.copy_of(frame), copied.synchronize
            copied.record()
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


class FallbackStore(Store):
    """``stores`` in the order in which they are asked."""

    def __init__(self, stores: Sequence[Store]) -> None:
        """Take stores that count in the same tiers."""
        super().__init__()
        self.stores, self.tiers = tuple(stores), stores[0].tiers
        self._at: dict[Hashable, Store] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the frames of all of them."""
        return sum(store.num_bytes for store in self.stores)

    def pool(self) -> Pool | None:
        """Buffers that suit the last one, the slowest."""
        return self.stores[-1].pool()

    def offloads_from(self, device: torch.device) -> bool:
        """Return whether any of them does."""
        return any(store.offloads_from(device) for store in self.stores)

    def admit(self, key: Hashable, num_bytes: int) -> bool:
        """Set room aside in the first that has some."""
        return self._admit(self.stores, key, num_bytes)

    def admit_dense(self, key: Hashable, num_bytes: int, device: torch.device) -> bool:
        """Set room aside in the first that has some and takes frames away from ``device``."""
        return self._admit([store for store in self.stores if store.offloads_from(device)], key, num_bytes)

    def _admit(self, stores: Sequence[Store], key: Hashable, num_bytes: int) -> bool:
        for store in stores:
            if (store is self.stores[-1] or store.fits(num_bytes)) and store.admit(key, num_bytes):
                self._at[key] = store
                return True
        return False

    def put(self, key: Hashable, frame: Frame) -> None:
        """Keep ``frame`` where it was admitted; one that nobody asked for goes to the last."""
        self._at.setdefault(key, self.stores[-1]).put(key, frame)

    def fetch(self, key: Hashable) -> None:
        """Begin to bring a frame."""
        if (store := self._at.get(key)) is not None:
            store.fetch(key)

    def get(self, key: Hashable) -> Frame:
        """Return the frame."""
        return self._at[key].get(key)

    def drop(self, key: Hashable) -> None:
        """Forget a frame."""
        if (store := self._at.pop(key, None)) is not None:
            store.drop(key)


STORES: dict[str, Callable[..., Store]] = {"packed": Store, "host": HostStore, "disk": DiskStore}


def open_store(tier: str, options: StoreOptions = UNLIMITED) -> Store:
    """Return a new, empty store of ``tier``; where it has a limit and there is a disk, with that behind it.

    Raises:  ConfigError: there is no such tier."""
    if tier not in tuple(STORES):  # a tuple: what was given may have no hash
        raise ConfigError(f"tier is one of {', '.join(STORES)}, found {tier!r}; choose one of these")
    store = STORES[tier](options)
    if tier != "disk" and options.disk is not None and store.is_limited:
        return FallbackStore([store, DiskStore(options)])
    return store
