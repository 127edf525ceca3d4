"""Stores of frames between a forward and its backward: the tiers ``packed``, ``host`` and ``disk``.

On a CPU host memory is where the tensors are, so frames stay; those of a GPU are copied to pinned memory and
back. A frame that is wanted before a disk has it is taken from memory. A new tier is a class here, one row of
the table at the end, and what CONTRIBUTING.md lists.
"""
# ruff: noqa: D102 (methods of stores are those of Store)

import dataclasses
from collections.abc import Callable, Hashable
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
    """Options that a store is opened with; a store takes what concerns it."""

    path: Path | None = None  # the folder of a tier that keeps files
    budget: int | None = None  # the most bytes of frames
    disk: Disk | None = None  # that all stores of a rank share; None: each its own
    tiers: Tiers | None = None  # those of the rank; None: each its own


UNLIMITED = StoreOptions()


class Store:
    """Keeps frames by key, in the memory that they were packed in; called from any thread, may block."""

    tier = "packed"

    def __init__(self, options: StoreOptions = UNLIMITED) -> None:
        self._budget, self._frames = options.budget, dict[Hashable, Frame]()
        self._num_bytes: dict[Hashable, int] = {}  # of what was put or admitted
        self.tiers = options.tiers or Tiers()
        self._counter = self.tiers.counters[self.tier]
        self.limits = self._counter, *self._counter.wider  # what counts its frames

    @property
    def num_bytes(self) -> int:
        """Bytes of the frames that it keeps or has admitted."""
        return sum(list(self._num_bytes.values()))

    def pool(self) -> Pool | None:
        """Return the pool that frames for this store are packed best in; None: any."""

    def offloads_from(self, device: torch.device) -> bool:
        """Return whether frames made on ``device`` leave it, so that one that did not shrink is worth it."""
        return False

    @property
    def takes_pieces(self) -> bool:
        """Return whether a tensor is best put in pieces: all that is put leaves memory."""
        return False

    def admit(self, key: Hashable, num_bytes: int, *, dense: torch.device | None = None) -> bool:
        """Set ``num_bytes`` aside for a frame that will be put; False: there is no room. ``dense``: that of a
        frame that did not shrink, and so is of use only away from it."""
        fits = self._budget is None or self.num_bytes + num_bytes <= self._budget
        fits = fits and self._counter.fits(num_bytes)  # the device need not: it is the tensor that leaves
        if fits:
            self._count(key, num_bytes)
        return fits

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
    """A pool whose buffers are new and freed with their frames, also by a garbage collector in any thread."""

    def take(self, num_bytes: int) -> Tensor:
        return new_bytes(num_bytes)

    def give(self, buffer: Tensor) -> None:
        pass


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
    """Frames in host memory; those made on a GPU are copied there and back, inside ``Stream.run``."""

    tier = "host"

    def __init__(self, options: StoreOptions = UNLIMITED) -> None:
        super().__init__(options)
        self._pinned, self._unpooled = PinnedPool(), UnpooledBuffers()
        self._devices: dict[Hashable, torch.device] = {}
        self._back: dict[Hashable, Frame] = {}

    def offloads_from(self, device: torch.device) -> bool:
        return is_gpu(device)

    def put(self, key: Hashable, frame: Frame) -> None:
        if frame.buffer.is_cuda:
            self._devices[key] = frame.buffer.device
            frame = self._pinned.copy_of(frame)
        super().put(key, frame)

    def fetch(self, key: Hashable) -> None:
        if key in self._devices and key not in self._back:
            pinned = self._frames[key]
            buffer = pinned.bytes.to(self._devices[key], non_blocking=True)
            self._back[key] = Frame(buffer, pinned.num_bytes, self._unpooled)

    def get(self, key: Hashable) -> Frame:
        self.fetch(key)
        return self._back.pop(key, None) or super().get(key)

    def drop(self, key: Hashable) -> None:
        self._back.pop(key, None)
        self._devices.pop(key, None)
        super().drop(key)


class DiskStore(HostStore):
    """Frames on a disk; those of a GPU pass through pinned memory, inside ``Stream.run``."""

    tier = "disk"

    def __init__(self, options: StoreOptions = UNLIMITED) -> None:
        super().__init__(options)
        self.disk = options.disk or Disk(DiskOptions(path=options.path), tiers=self.tiers)
        self._entries: dict[Hashable, SwapEntry] = {}

    def pool(self) -> Pool:
        return self.disk.buffers

    def offloads_from(self, device: torch.device) -> bool:
        return not self.disk.space.is_full

    @property
    def takes_pieces(self) -> bool:
        return not self.disk.space.is_full

    def put(self, key: Hashable, frame: Frame) -> None:
        """Begin to write ``frame``; waits while much is to be written, and raises what a write raised."""
        ready = None
        if frame.buffer.is_cuda:
            self._devices[key], copied = frame.buffer.device, torch.Event(frame.buffer.device)
            frame, ready = self._pinned.copy_of(frame), copied.synchronize
            copied.record()
        num_bytes = frame.num_bytes
        self._entries[key] = self.disk.write(frame, ready=ready)
        self._count(key, num_bytes)

    def fetch(self, key: Hashable) -> None:
        if (entry := self._entries.get(key)) is not None:
            self.disk.fetch(entry, self._pinned if key in self._devices else None)

    def get(self, key: Hashable) -> Frame:
        """Return the frame; StageError if it is not what was written, or the disk refuses."""
        entry = self._entries[key]
        if (device := self._devices.get(key)) is None:
            return self.disk.get(entry)
        pinned = self.disk.get(entry, self._pinned)
        buffer = pinned.bytes.to(device)
        if pinned is not entry.frame:
            pinned.release()
        return Frame(buffer, pinned.num_bytes, self._unpooled)

    def drop(self, key: Hashable) -> None:
        super().drop(key)
        if (entry := self._entries.pop(key, None)) is not None:
            self.disk.forget(entry)


class FallbackStore(Store):
    """A ``first`` store with limits, and a ``last`` one for what has no room there."""

    def __init__(self, first: Store, last: Store) -> None:
        super().__init__()
        self.stores, self.tiers = (first, last), first.tiers
        self._at: dict[Hashable, Store] = {}

    @property
    def num_bytes(self) -> int:
        return sum(store.num_bytes for store in self.stores)

    def pool(self) -> Pool | None:
        return self.stores[-1].pool()

    def offloads_from(self, device: torch.device) -> bool:
        return any(store.offloads_from(device) for store in self.stores)

    def admit(self, key: Hashable, num_bytes: int, *, dense: torch.device | None = None) -> bool:
        for store in self.stores if dense is None else filter(lambda s: s.offloads_from(dense), self.stores):
            has_room = store is self.stores[-1] or all(one.fits(num_bytes) for one in store.limits)
            if has_room and store.admit(key, num_bytes):
                self._at[key] = store
                return True
        return False

    def put(self, key: Hashable, frame: Frame) -> None:
        """Keep ``frame`` where it was admitted; one that nobody asked for goes to the last."""
        self._at.setdefault(key, self.stores[-1]).put(key, frame)

    def fetch(self, key: Hashable) -> None:
        if (store := self._at.get(key)) is not None:
            store.fetch(key)

    def get(self, key: Hashable) -> Frame:
        return self._at[key].get(key)

    def drop(self, key: Hashable) -> None:
        if (store := self._at.pop(key, None)) is not None:
            store.drop(key)


STORES: dict[str, Callable[..., Store]] = {"packed": Store, "host": HostStore, "disk": DiskStore}


def open_store(tier: str, options: StoreOptions = UNLIMITED) -> Store:
    """Return a new, empty store of ``tier``; where it has a limit and there is a disk, with that behind."""
    if tier not in tuple(STORES):  # a tuple: what was given may have no hash
        raise ConfigError(f"tier is one of {', '.join(STORES)}, found {tier!r}; choose one of these")
    store = STORES[tier](options)
    if tier != "disk" and options.disk is not None and any(one.limit is not None for one in store.limits):
        return FallbackStore(store, DiskStore(options))
    return store
