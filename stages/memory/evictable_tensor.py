"""The bytes of one tensor that may wait in a store: taken away from it, given back where it was looked at.

The tensor itself stays, with its identity, hooks and count of writes; what it has while its bytes are away
is no element at all, so that whoever reads it ahead of its time gets an error, never other values. Its
strides and its address mod 64 come back as they were: other ones would pick other kernels.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from ...compression.buffers import Frame
from ...compression.codec import decode, encode
from ...compression.frame import ALIGNMENT
from ..device import is_gpu
from ..worker import Worker
from .byte_budget import Share
from .packer import FOR_SAVED, WORTH
from .saved_storage import Bytes, TensorView, bytes_around, empty, is_elements, new_bytes, row_view, view_of
from .stores import Store, UnpooledBuffers


def may_leave(tensor: Tensor, *, min_bytes: int) -> bool:
    """Return whether ``tensor`` is nothing but plain elements in memory, of ``min_bytes`` bytes or more."""
    return is_elements(tensor) and tensor.numel() * tensor.itemsize >= max(1, min_bytes)


class TensorStore:
    """A store of tensors' bytes, and how they lie in it: ``packs``: packed where that pays, else as they are.

    ``ahead``: the thread that prefetches. ``resident``: bytes outside of the store.
    ``bytes_out`` and ``bytes_in`` count what left and what came, unpacked."""

    def __init__(self, store: Store, *, packs: bool) -> None:
        """TensorStore that are made here are memory of their own, which nobody uses again."""
        self.store, self.packs, self.own = store, packs, UnpooledBuffers()
        self.ahead = Worker("penstock-memory-parameters")
        self.bytes_out, self.bytes_in, self.resident = 0, 0, Share(store.tiers.device)
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
    """The bytes of one tensor in a store, or near.

    A frame that is not packed is the tensor's own memory, which changes hands: where a store leaves frames
    in memory nothing is copied."""

    def __init__(self, frames: TensorStore, tensor: Tensor) -> None:
        """Take note of how ``tensor`` lies in memory; nothing moves yet."""
        self._frames, self._key = frames, object()
        self._view: TensorView = view_of(tensor)._replace(start=0)
        self._device, self._address = tensor.device, tensor.data_ptr() % ALIGNMENT
        self.num_bytes = self._view.num_bytes
        self._packs, self._packed, self.stored = frames.packs, False, False

    def put(self, tensor: Tensor, *, written: bool = True) -> bool:
        """Have the store keep the bytes of ``tensor``, which is to let go of them; False: it has no room.

        Args:    written: it may differ from what the store has, if that has it."""
        if self.stored and not written:
            return True
        self.drop()
        row = row_view(self.num_bytes // tensor.itemsize, tensor.dtype)
        flat = row.over(bytes_around(0, tensor))
        frame, store = self._frame(flat), self._frames.store
        if not store.admit(self._key, frame.num_bytes):
            return False
        resident = self._frames.resident  # from here on the store counts it
        resident.set(resident.num_bytes - self.num_bytes)
        store.put(self._key, frame)
        self.stored = True
        self._frames.count(out=self.num_bytes)
        return True

    def get(self) -> Tensor:
        """Return the tensor in memory, to be read; the store keeps its bytes."""
        self._frames.count(came=self.num_bytes)
        with self._frames.reading(self._device):
            return self._view.over(self._bytes_of(self._frames.store.get(self._key)))

    def take(self) -> Tensor:
        """Return the tensor in memory, to be written; the store forgets it."""
        with self._frames.exposed():
            tensor = self.get()
        self.drop()
        return tensor

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy of ``tensor`` that lies in memory as this one does."""
        found, row = self.empty(), row_view(self.num_bytes, torch.uint8)
        row.over(bytes_around(0, found)).copy_(row.over(bytes_around(0, tensor)))
        return found

    def empty(self) -> Tensor:
        """Return a tensor of any values that lies in memory as this one does."""
        return self._view.over(new_bytes(self.num_bytes, self._address, self._device))

    def fetch(self) -> None:
        """It is wanted soon: have the store begin to bring it."""
        if self.stored:
            self._frames.store.fetch(self._key)

    @property
    def like(self) -> Tensor:
        """A tensor of its shape, strides and dtype, without memory."""
        return torch.empty_strided(self._view.size, self._view.stride, dtype=self._view.dtype, device="meta")

    @property
    def takes_time(self) -> bool:
        """Return whether ``get`` has something to do that another thread may: a GPU has its own order."""
        away = self._packed or self._frames.store.offloads_from(self._device)
        return away and not is_gpu(self._device)

    def drop(self) -> None:
        """Forget what the store has."""
        if self.stored:
            self._frames.store.drop(self._key)
        self.stored = False

    def _frame(self, flat: Tensor) -> Frame:
        own = self._frames.own
        if self._packs:
            packed = encode(flat, FOR_SAVED)
            if packed.numel() * WORTH <= self.num_bytes:
                self._packed = True
                return Frame(packed, packed.numel(), own)
            self._packs = False  # dense numbers stay dense
        self._packed = False
        return Frame(flat.view(torch.uint8), self.num_bytes, own)

    def _bytes_of(self, frame: Frame) -> Bytes:
        if self._packed:
            flat = decode(frame.bytes)
            assert flat is not None, "a tensor has bytes"
            return bytes_around(0, flat)
        if frame.pool is self._frames.own:
            return bytes_around(0, frame.buffer)
        found = new_bytes(self.num_bytes, self._address, frame.buffer.device)
        row_view(self.num_bytes, torch.uint8).over(found).copy_(frame.bytes)
        return found


def hollow(tensor: Tensor) -> None:
    """Let ``tensor`` go of its memory; it has no element until it gets other memory."""
    tensor.data = empty(tensor.dtype, tensor.device)
