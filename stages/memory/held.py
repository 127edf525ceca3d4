"""One storage between its forward and its backward, and the saved tensors that look into it.

Autograd saves tensors, but memory is freed by storages: a storage leaves once, as one frame, and all tensors
that shared it share it again when it is back.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...compression.errors import StageError
from ...compression.frame import ALIGNMENT
from ...compression.geometry import geometry

if TYPE_CHECKING:
    from ..tracing.layers import Layer
    from .keeper import Keeper


class Bytes(NamedTuple):
    """Where the bytes of a saved storage lie: byte 0 is at ``origin`` in ``storage`` (may be negative)."""

    storage: torch.UntypedStorage
    origin: int


class Look(NamedTuple):
    """How one saved tensor looks into its storage, and which layer saved it."""

    layer: Layer | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int  # byte of the storage where its first element lies

    @property
    def end(self) -> int:
        """Byte of the storage behind its last element."""
        return self.start + geometry(self.size, self.stride, self.dtype.itemsize).span * self.dtype.itemsize

    def into(self, found: Bytes) -> Tensor:
        """The tensor over ``found``; StageError if that was cut short since: torch would make it longer."""
        if found.origin + self.end > found.storage.nbytes():
            raise StageError(
                "what the forward saved must keep its memory until its backward, found a storage of "
                f"{self.end} bytes or more that was resized to {found.storage.nbytes()}; do not free what a "
                "layer saved"
            )
        first = (found.origin + self.start) // self.dtype.itemsize
        return empty(self.dtype, found.storage.device).set_(found.storage, first, self.size, self.stride)


def look(tensor: Tensor, layer: Layer | None) -> Look:
    """How ``tensor``, saved by ``layer``, looks into its storage."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    return Look(layer, tensor.dtype, tuple(tensor.size()), tensor.stride(), start)


def empty(dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """No elements; torch.empty itself warns of the complex dtypes that it calls experimental."""
    return torch.empty(0, dtype=torch.uint8, device=device).view(dtype)


def new_bytes(num_bytes: int, address: int) -> Bytes:
    """New memory on the CPU that begins at ``address`` mod 64, not cleared."""
    storage = torch.UntypedStorage(num_bytes + ALIGNMENT)
    return Bytes(storage, (address - storage.data_ptr()) % ALIGNMENT)


def refuse_written(saved: int, now: int) -> None:
    """Raise StageError if a saved tensor was written to: torch checks only what it saved without hooks."""
    if now != saved:
        raise StageError(
            "what the forward saved must not be written to before its backward, found a tensor at version "
            f"{now} that was saved at version {saved}; clone it before the in-place operation"
        )


class Writes:
    """Counts the writes to a tensor (torch's version) without holding its memory."""

    __slots__ = ("_probe", "_version")

    def __init__(self, tensor: Tensor) -> None:
        """Begin with what ``tensor`` has seen so far."""
        probe = tensor.detach()  # shares the count, and keeps it when its memory is exchanged
        probe.data = empty(tensor.dtype, tensor.device)
        self._probe, self._version = probe, tensor._version

    @property
    def found(self) -> bool:
        """Whether the tensor, or another that shares its count, was written to since."""
        return self._probe._version != self._version

    def none_to(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` shares this count and saw no write since: one more is made and taken back."""
        if self.found or tensor._version != self._version:
            return False
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor):
            torch.autograd.graph.increment_version(tensor)
            return self.found

    def refuse(self) -> None:
        """Raise StageError if there was one."""
        refuse_written(self._version, self._probe._version)


class Untouched:
    """A saved tensor that stays where it is: without its graph, which would hold itself for ever."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        """Keep another tensor over the same memory."""
        self._tensor, self._version = tensor.detach(), tensor._version

    def unpack(self) -> Tensor:
        """The tensor; StageError if it was written to."""
        refuse_written(self._version, self._tensor._version)
        return self._tensor


class Record:
    """A saved tensor whose storage may leave: what autograd holds in its place."""

    __slots__ = ("_held", "_number", "_writes")

    def __init__(self, held: Held, number: int, tensor: Tensor) -> None:
        """Stand for ``tensor``, number ``number`` of those that look into ``held``."""
        self._held, self._number, self._writes = held, number, Writes(tensor)

    def unpack(self) -> Tensor:
        """The tensor, in memory again; StageError if it was written to."""
        self._writes.refuse()
        return self._held.ask(self._number)


class Held:
    """A storage: its bytes until it leaves, a frame in the store, its bytes again while they are asked for.

    It lives as long as a record of it, that is as long as the graph.
    """

    def __init__(self, tensor: Tensor, *, keeper: Keeper, before: Held | None) -> None:
        """Hold the storage of ``tensor``; ``before`` is what was saved before it, and is asked for after."""
        storage = tensor.untyped_storage()
        self.key, self.keeper = object(), keeper
        self.num_bytes, self.dtype = storage.nbytes(), tensor.dtype
        self.address, self._pointer = storage.data_ptr() % ALIGNMENT, storage.data_ptr()
        self.writes, self.mark = Writes(tensor), keeper.lane(tensor.device).mark()
        self.before = (lambda: None) if before is None else weakref.ref(before)
        self.looks: list[Look] = []
        self.bytes: Bytes | None = Bytes(storage, 0)
        self.shift = 0  # of the storage, where a frame's tensor begins
        self.expand: Callable[[Tensor], Bytes] | None = None
        self.device = tensor.device
        self.left = self.dropped = self.expected = False
        self.original = StorageWeakRef(storage)  # while this lives, its number is not given to another
        self._last = self.original, 0
        self._lock = threading.Lock()
        self._wanted: set[int] = set()

    def add(self, tensor: Tensor, layer: Layer | None) -> Record:
        """One more saved tensor that looks into this storage."""
        self._wanted.add(len(self.looks))
        self.looks.append(look(tensor, layer))
        return Record(self, len(self.looks) - 1, tensor)

    def unmoved(self, storage: torch.UntypedStorage) -> bool:
        """Whether ``storage``, which is the one held, has the memory that it had then: it may be resized."""
        return storage.nbytes() == self.num_bytes and storage.data_ptr() == self._pointer

    def flat(self) -> Tensor | None:
        """The whole storage as one row of elements; None where it left, or got other memory meanwhile."""
        found = self.bytes
        if found is None or not self.unmoved(found.storage):
            return None
        dtype = torch.uint8 if self.num_bytes % self.dtype.itemsize else self.dtype
        return Look(None, dtype, (self.num_bytes // dtype.itemsize,), (1,), 0).into(found)

    def leave(self) -> None:
        """Let go of the bytes, unless they are asked for again: a frame in the store has them."""
        with self._lock:
            self.left = True
            if not self.expected:
                self.bytes = None

    def bring(self) -> Bytes:
        """The bytes, in memory until every tensor that looks into them was asked for once more."""
        with self._lock:
            return self._bring()

    def bring_ahead(self) -> None:
        """The same where they are still expected: they may have been used and let go of meanwhile."""
        with self._lock:
            if self.expected:
                self._bring()

    def ask(self, number: int) -> Tensor:
        """The saved tensor ``number``; what was saved shortly before is brought back meanwhile."""
        if self.dropped:
            raise StageError("a micro-batch has one backward, its saved tensors were dropped after it")
        self.keeper.ahead(self)
        found = self.bring()
        with self._lock:
            self.expected = False
            self._wanted.discard(number)
            if not self._wanted:  # the next pass over the same graph asks for all of them again
                self._wanted = set(range(len(self.looks)))
                self.bytes = None if self.left else self.bytes
        tensor = self.looks[number].into(found)
        self.keeper.lane(tensor.device).use(tensor)
        return tensor

    def _bring(self) -> Bytes:
        if self.bytes is None:
            self.bytes = self._again() or self.keeper.unpack(self)
            self._last = StorageWeakRef(self.bytes.storage), self.bytes.origin
        return self.bytes

    def _again(self) -> Bytes | None:
        """The bytes as they were last in memory, if anybody still has them."""
        reference, origin = self._last
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        return None if storage is None else Bytes(storage, origin)
