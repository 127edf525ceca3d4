"""The bytes of one tensor that may wait in a store.

The tensor itself stays, with its identity, hooks and count of writes, and has no element meanwhile: whoever
reads it ahead of its time gets an error, never other values. Its strides and its address mod 64 come back as
they were: other ones would pick other kernels.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from ...compression.buffers import Frame
from ...compression.codec import decode, encode
from ...compression.frame import ALIGNMENT
from ..device import is_gpu
from ..worker import Worker
from .byte_budget import ByteCounter, piece_bytes
from .packer import FOR_SAVED, WORTH
from .saved_storage import TensorView, bytes_around, empty, is_elements, new_bytes, row_view, view_of
from .stores import Store, UnpooledBuffers


def may_leave(tensor: Tensor, *, min_bytes: int) -> bool:
    """Return whether ``tensor`` is nothing but plain elements in memory, of ``min_bytes`` bytes or more."""
    return is_elements(tensor) and tensor.numel() * tensor.itemsize >= max(1, min_bytes)


class TensorStore:
    """A store of tensors' bytes, where they are packed if that pays (``packs``), else as they are."""

    def __init__(self, store: Store, *, packs: bool) -> None:
        self.store, self.packs, self.own = store, packs, UnpooledBuffers()
        self.ahead = Worker("penstock-memory-parameters")  # prefetches
        self.resident = ByteCounter(wider=(store.tiers.device,))  # bytes outside of the store
        self.bytes_out = self.bytes_in = 0  # of what left and what came, unpacked
        self.exposed_seconds = 0.0
        self._counting, self._reading = threading.Lock(), threading.Lock()

    def count(self, *, out: int = 0, came: int = 0) -> None:
        """Count bytes, in any thread."""
        with self._counting:
            self.bytes_out += out
            self.bytes_in += came

    @contextlib.contextmanager
    def exposed(self) -> Iterator[None]:
        """The block for which training waits; counted."""
        began = time.perf_counter()
        yield
        self.exposed_seconds += time.perf_counter() - began

    def reading(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        """The block in which a frame is got and read: a store may lend memory that it uses again."""
        return self._reading if self.store.offloads_from(device) else contextlib.nullcontext()


class EvictableTensor:
    """The bytes of one tensor in a store, or resident; ``places``: where each piece lies among its elements.

    Where a store takes frames off every device they are pieces of the tensor, of ``piece_bytes``. A frame
    that is not packed is the tensor's own memory, which changes hands without a copy."""

    def __init__(self, frames: TensorStore, tensor: Tensor, *, like: EvictableTensor | None = None) -> None:
        """Take note of how ``tensor`` lies in memory; nothing moves yet. It has the pieces of ``like``."""
        self._frames = frames
        self.view: TensorView = view_of(tensor)._replace(start=0)
        self._device, self._address = tensor.device, tensor.data_ptr() % ALIGNMENT
        self.num_bytes = self.view.num_bytes
        if like is not None and like.view == self.view:
            self.places = like.places
        else:
            length = piece_bytes(self.num_bytes) if frames.store.takes_pieces else self.num_bytes
            step, end = length // tensor.itemsize, self.num_bytes // tensor.itemsize
            self.places = [slice(first, min(first + step, end)) for first in range(0, end, step)]
        self._begin()

    def _begin(self) -> None:
        self._keys, self._is_packed = [object() for _ in self.places], [False] * len(self.places)
        self._packs, self.stored = self._frames.packs, False

    def alike(self) -> EvictableTensor:
        """Return the place of another tensor that lies in memory like this one; the store has none of it."""
        other = copy.copy(self)
        other._begin()
        return other

    def put(self, tensor: Tensor, *, written: bool = True) -> bool:
        """Have the store keep ``tensor``, unless it does and it is not ``written``; False: it has no room."""
        if self.stored and not written:
            return True
        flat = self.flat(tensor)
        if not all(self.put_piece(n, flat[place]) for n, place in enumerate(self.places)):
            self.drop()
            return False
        return True

    def put_piece(self, number: int, flat: Tensor) -> bool:
        """Have the store keep these elements as one piece; False: it has no room."""
        store, key, num_bytes = self._frames.store, self._keys[number], flat.numel() * flat.itemsize
        store.drop(key)
        frame = self._frame(number, flat)
        if not store.admit(key, frame.num_bytes):
            return False
        self._frames.resident.add(-num_bytes)  # from here on the store counts it
        store.put(key, frame)
        self.stored = True
        self._frames.count(out=num_bytes)
        return True

    def get(self) -> Tensor:
        """Return the tensor in memory, to be read; the store keeps its bytes."""
        if len(self.places) == 1:
            return self.view.over(bytes_around(0, self.get_piece(0)))
        tensor = self.empty()
        flat = self.flat(tensor)
        for number, place in enumerate(self.places):
            self.get_piece(number, flat[place])
        return tensor

    def get_piece(self, number: int, into: Tensor | None = None) -> Tensor:
        """Return the elements of one piece, which the store keeps, to be read; in ``into``, if given."""
        place, dtype, is_packed = self.places[number], self.view.dtype, self._is_packed[number]
        row = row_view(place.stop - place.start, dtype)
        self._frames.count(came=row.num_bytes)
        with self._frames.reading(self._device):
            frame = self._frames.store.get(self._keys[number])
            if not is_packed and (into is not None or frame.pool is not self._frames.own):
                if into is None:
                    address = (self._address + place.start * dtype.itemsize) % ALIGNMENT
                    into = row.over(new_bytes(row.num_bytes, address, frame.buffer.device))
                into.view(torch.uint8).copy_(frame.bytes)
                return into
            tensor = decode(frame.bytes) if is_packed else frame.buffer
        assert tensor is not None, "a tensor has bytes"
        elements = row.over(bytes_around(0, tensor))
        return elements if into is None else into.copy_(elements)

    def take(self) -> Tensor:
        """Return the tensor in memory, to be written; the store forgets it."""
        with self._frames.exposed():
            tensor = self.get()
        self.drop()
        return tensor

    def add(self, tensor: Tensor) -> bool:
        """Add ``tensor`` piece by piece to what the store has; False: the store has no room."""
        flat = self.flat(tensor)
        for number, place in enumerate(self.places):
            self.fetch([number + 1])
            with self._frames.exposed():
                piece = self.get_piece(number)
            self._frames.resident.add(piece.nbytes)
            if not self.put_piece(number, piece.add_(flat[place])):
                return False
        return True

    def flat(self, tensor: Tensor) -> Tensor:
        """Return the elements of ``tensor``, which lies in memory like this one, in the order of memory."""
        return row_view(self.num_bytes // tensor.itemsize, tensor.dtype).over(bytes_around(0, tensor))

    def empty(self) -> Tensor:
        """Return a tensor of any values that lies in memory as this one does."""
        return self.view.over(new_bytes(self.num_bytes, self._address, self._device))

    def fetch(self, numbers: Iterable[int] | None = None) -> None:
        """It is wanted soon, or these pieces are: have the store begin to bring them."""
        for number in range(len(self.places)) if numbers is None else numbers:
            if self.stored and number < len(self.places):
                self._frames.store.fetch(self._keys[number])

    @property
    def like(self) -> Tensor:
        """A tensor of its shape, strides and dtype, without memory."""
        return torch.empty_strided(self.view.size, self.view.stride, dtype=self.view.dtype, device="meta")

    @property
    def takes_time(self) -> bool:
        """Return whether ``get`` has something to do that another thread may: a GPU has its own order."""
        is_away = any(self._is_packed) or self._frames.store.offloads_from(self._device)
        return is_away and not is_gpu(self._device)

    def drop(self) -> None:
        """Forget what the store has."""
        for key in self._keys:
            self._frames.store.drop(key)
        self.stored = False

    def _frame(self, number: int, flat: Tensor) -> Frame:
        own, num_bytes = self._frames.own, flat.numel() * flat.itemsize
        if self._packs:
            packed = encode(flat, FOR_SAVED)
            self._is_packed[number] = self._packs = packed.numel() * WORTH <= num_bytes
            if self._packs:  # else dense numbers stay dense
                return Frame(packed, packed.numel(), own)
        self._is_packed[number] = False
        if len(self.places) > 1 and not self._frames.store.takes_pieces:  # it stays, and would keep all of it
            flat = flat.clone()
        return Frame(flat.view(torch.uint8), num_bytes, own)


def hollow(tensor: Tensor) -> None:
    """Let ``tensor`` go of its memory; it has no element until it gets other memory."""
    tensor.data = empty(tensor.dtype, tensor.device)
