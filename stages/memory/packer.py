"""Packs saved storages into a store and brings them back, for stages and ``penstock.offload``.

Three threads, so that a slow store stops neither packing nor what comes back:

    whoever moves -> packing thread -> I/O thread -> store
                     encode            put
                  -> reading thread <--------------- store
                     get and decode

What does not shrink is left where it is. The layers that saved a storage are those whose backwards read it,
so its form may leave out what these do not read:

    saved by ReLU (its result) and max-pools (their input, for its shape)    one bit per element
    saved by max-pools alone                                                 nothing
    noise of a dropout                      two words and one bit per element; checked exactly
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ...compression.buffers import Frame, Pool
from ...compression.codec import CODECS, buffer_bytes, decode, encode, pack_into
from ...compression.errors import CodecError
from ...compression.frame import read_header
from ...compression.names import AUTO
from ..device import device_of
from ..tracing.dataflow import is_unmodified
from ..tracing.layers import Layer
from ..worker import Stream, Worker
from .saved_storage import (
    Bytes,
    SavedStorage,
    Space,
    TensorView,
    WriteCounter,
    bytes_around,
    new_bytes,
    row_view,
    view_of,
)
from .stores import Store, UnpooledBuffers

_KINDS: dict[Any, str] = {
    nn.ReLU: "relu", F.relu: "relu", torch.relu: "relu", torch.relu_: "relu",
    Tensor.relu: "relu", Tensor.relu_: "relu",
    nn.MaxPool2d: "pool", F.max_pool2d: "pool", torch.max_pool2d: "pool",
    nn.Dropout: "dropout", F.dropout: "dropout", torch.dropout: "dropout",
}  # fmt: skip
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
Modules = Mapping[str, nn.Module]


class Compact(NamedTuple):
    """A compact form of a storage: one row of fewer bytes, and how they become the storage again."""

    tensor: Tensor
    expand: Callable[[Tensor, Space], Bytes]


@dataclasses.dataclass(frozen=True)
class LayerAwareCompressor:
    """Chooses a compact form by layers."""

    modules: Modules  # that the stage's layers call, by their path

    def kind(self, layer: Layer | None) -> str:
        """``"relu"``, ``"pool"``, ``"dropout"``, or "" where a layer proves nothing."""
        if layer is None or layer.node.op == "get_attr":
            return ""
        if layer.node.op != "call_module":
            return _KINDS.get(layer.node.target, "")
        module = self.modules[str(layer.node.target)]
        return _KINDS.get(type(module), "") if is_unmodified(module) else ""

    def compress(self, flat: Tensor, views: Sequence[TensorView]) -> Compact | None:
        """Return a compact form of the storage ``flat``, in the dtype of its first view, or None."""
        kinds = {self.kind(view.layer) for view in views}
        is_one_dtype = {view.dtype for view in views} == {flat.dtype}
        if not (flat.is_cpu and flat.numel() and is_one_dtype and flat.is_floating_point()):
            return None
        if kinds == {"pool"}:  # a max-pool's backward goes by its indices, and reads no value of its input
            expand = functools.partial(_zeros, flat.nbytes, flat.data_ptr() % 64)
            return Compact(flat[:0].view(torch.uint8), expand)
        if "relu" in kinds and kinds <= {"relu", "pool"}:
            return signs(flat)
        return two_words(flat) if kinds == {"dropout"} else None


def signs(flat: Tensor) -> Compact:
    """One bit per element, 1.0 where ReLU's backward lets the gradient through: not (x <= 0), so at NaN."""
    return _bitmap((flat <= 0).logical_not_(), flat, flat.new_tensor(0), flat.new_tensor(1))


def _zeros(num_bytes: int, address: int, _: Tensor, space: Space) -> Bytes:
    # in pages that the system gives out when they are first touched: never
    storage = torch.zeros(num_bytes + 64, dtype=torch.uint8).untyped_storage()
    return Bytes(storage, (address - storage.data_ptr()) % 64)


def two_words(flat: Tensor) -> Compact | None:
    """Two different words and which of them stands where; None if there are more."""
    words = flat.view(_WORDS[flat.itemsize])
    low, high = words.aminmax()
    is_high = words == high
    if not (is_high | (words == low)).all():
        return None
    return _bitmap(is_high, flat, low.clone(), high.clone())


def _bitmap(is_high: Tensor, flat: Tensor, low: Tensor, high: Tensor) -> Compact:
    """One bit per element of ``flat``, which comes back as ``high`` where it is set and ``low`` elsewhere."""
    bits = torch.from_numpy(np.packbits(is_high.numpy(), bitorder="little"))
    return Compact(bits, functools.partial(_from_bitmap, flat.numel(), low, high, flat.data_ptr() % 64))


def _from_bitmap(
    num_elements: int, low: Tensor, high: Tensor, address: int, bits: Tensor, space: Space
) -> Bytes:
    memory = space()
    if memory is None:
        found = new_bytes(num_elements * low.itemsize, address)
    else:
        found = Bytes(memory.untyped_storage(), address, in_slot=True)
    is_high = torch.from_numpy(np.unpackbits(bits.numpy(), count=num_elements, bitorder="little"))
    torch.where(is_high.view(torch.bool), high, low, out=row_view(num_elements, low.dtype).over(found))
    return found


FOR_SAVED = "zero_value+exponent"  # "auto": at memory speed, either where a sample says that it pays
WORTH = 16 / 15  # raw bytes per byte of frame from which on it is worth to unpack again
Unpack = Callable[[Tensor, Space], Bytes]  # a frame to the bytes of its storage
Compress = Callable[[Tensor, Sequence[TensorView]], Compact | None]


class WireFrame(NamedTuple):
    """A frame that was made of a tensor to be sent, and the storage and view of that tensor."""

    frame: Frame
    storage: StorageWeakRef  # which keeps its identity
    view: TensorView

    @classmethod
    def of(cls, tensor: Tensor, frame: Frame) -> WireFrame:
        """Return the frame of ``tensor``, which is still as it was packed."""
        return cls(frame, StorageWeakRef(tensor.untyped_storage()), view_of(tensor))

    def covers(self, saved: SavedStorage) -> bool:
        """Return whether it has every byte that the graph reads of ``saved``, without loss."""
        if self.storage.cdata != saved.original.cdata:
            return False
        first, end = min(view.start for view in saved.views), max(view.end for view in saved.views)
        header = read_header(self.frame.buffer)
        whole = header.dtype is not None and not header.flags and header.codec in CODECS
        whole = whole and header.geometry.order == "dense"
        return whole and self.view.start <= first and end <= self.view.end


@dataclasses.dataclass(slots=True)
class SavedCounts:
    """Counts of saved tensors."""

    bytes_raw: int = 0  # of the storages that were to leave, each once: without parameters and small ones
    bytes_kept: int = 0  # frames, what did not shrink or found no room, what was wanted before it left
    num_packs: int = 0  # frames that were made here, not those of the wire
    num_unpacks: int = 0  # frames that were brought back, for the backwards so far
    exposed_seconds: float = 0.0  # for which backwards waited for what was not back yet


class SavedTensorPacker:
    """One store with its codec, threads and counters."""

    def __init__(self, store: Store, *, codec: str, pool: Pool, num_ahead: int) -> None:
        """Pack with ``codec`` into buffers of ``pool``; bring back ``num_ahead`` storages ahead."""
        codec = FOR_SAVED if codec == AUTO else codec
        if codec not in tuple(CODECS):  # a tuple: what was given may have no hash
            found = f"codec is one of {', '.join((AUTO, *CODECS))}, found {codec!r}"
            raise CodecError(f"{found}; what a backward reads comes back bit for bit")
        self.store, self.codec, self._pool, self._num_ahead = store, codec, pool, num_ahead
        self.packing, self.io = Worker("penstock-memory-packing"), Worker("penstock-memory-io")
        self.reading = Worker("penstock-memory-reading", depth=64)
        self._workers = self.packing, self.io, self.reading
        self.packed: Callable[[], None] = lambda: None  # called when a storage was packed
        self._streams: dict[torch.device, Stream] = {}
        self._unpooled, self._counting = UnpooledBuffers(), threading.Lock()
        self._scratch = self._unpooled.take(0)  # of the packing thread
        self.counts = SavedCounts()

    def stream(self, device: torch.device) -> Stream:
        """Return the stream on which tensors of ``device`` are packed and unpacked."""
        if device not in self._streams:
            self._streams[device] = device_of(device).stream()
        return self._streams[device]

    def queue(
        self, storage: SavedStorage, *, wire: WireFrame | None = None, compress: Compress = lambda *_: None
    ) -> None:
        """Pack ``storage``, which is leaving, in a form that ``compress`` gives by its views, unless it has a
        ``wire`` frame, whose hold becomes the packer's; waits while the packing is behind."""
        self.packing.submit(functools.partial(self._pack_next, weakref.ref(storage), wire, compress))

    def read(self, storage: SavedStorage, number: int, writes: WriteCounter) -> Tensor:
        """Return the saved tensor ``number``, and begin to bring back what was saved before."""
        writes.refuse()
        before = storage.previous()
        for _ in range(self._num_ahead):
            if before is None:
                break
            if self.reading.has_room and before.transition("loading", only_from="offloaded"):
                self.bring([weakref.ref(before)])
            before = before.previous()
        is_resident, began = storage.state in ("resident", "evicting"), time.perf_counter()
        tensor = storage.read(number)
        if not is_resident:
            self.counts.exposed_seconds += time.perf_counter() - began
        return writes.counted(tensor)

    def bring(self, storages: Sequence[weakref.ref[SavedStorage]]) -> None:
        """Bring back ``storages``, which are on their way now: the store begins with all of them at once."""
        for reference in storages:
            if (storage := reference()) is not None:
                with storage.stream.run():
                    self.store.fetch(storage.key)
        if storages:
            self.reading.submit(functools.partial(_bring, storages))

    def check(self) -> None:
        """Raise again what a thread raised."""
        for worker in self._workers:
            worker.check()

    def close(self) -> None:
        """Do what is queued and end the threads."""
        for worker in self._workers:
            worker.close()
        self._scratch = self._unpooled.take(0)

    def _pack_next(self, *what: Any) -> None:
        try:
            self._pack(*what)
        except BaseException:
            self._keep(what[0]())
            raise
        finally:
            self.packed()

    def _pack(self, reference: weakref.ref[SavedStorage], wire: WireFrame | None, compress: Compress) -> None:
        # 1. the frame: one of the wire, or one that is made here
        storage = reference()
        flat = None if storage is None else storage.flat()
        if storage is None or flat is None:
            if wire is not None:
                wire.frame.release()
            return self._keep(storage)
        if wire is not None:
            frame, unpack = wire.frame, functools.partial(_as_it_was, wire.view.start)
        else:
            with storage.stream.run(storage.event):
                compact = compress(flat, storage.views)
                frame = self._frame(storage, flat if compact is None else compact.tensor)
            unpack = functools.partial(_as_it_was, 0)
            if compact is not None:
                unpack = functools.partial(_expanded, compact.expand)
            if frame is None:
                return self._keep(storage)
            self.counts.num_packs += 1
        # 2. its place in the store
        key, num_bytes = storage.key, frame.num_bytes
        dense = None if num_bytes <= storage.num_bytes // WORTH else storage.device
        if not self.store.admit(key, num_bytes, dense=dense):
            frame.release()
            return self._keep(storage)
        self.io.submit(functools.partial(self._put, storage, frame, unpack))

    def _put(self, storage: SavedStorage, frame: Frame, unpack: Unpack) -> None:
        if storage.state != "evicting":  # wanted again or dropped, while the frame was queued
            frame.release()
            return self._keep(storage)
        try:
            with storage.stream.run(storage.event):
                self.store.put(storage.key, frame)
        except BaseException:
            self._keep(storage)
            raise
        self._count(storage, frame.num_bytes)
        if not storage.stored(functools.partial(self._load, storage.key, storage.stream, unpack)):
            self.store.drop(storage.key)

    def _load(self, key: object, stream: Stream, unpack: Unpack, space: Space) -> Bytes:
        with stream.run():  # the store keeps the frame, so that a graph can be walked once more
            frame = self.store.get(key)
            with self._counting:
                self.counts.num_unpacks += 1
            return unpack(frame.bytes, space)

    def _keep(self, storage: SavedStorage | None) -> None:
        if storage is None:
            return
        self.store.drop(storage.key)  # what was admitted
        storage.transition("resident", only_from="evicting")
        self._count(storage, storage.num_bytes)

    def _frame(self, storage: SavedStorage, flat: Tensor) -> Frame | None:
        """Return the frame of ``flat``, all of ``storage`` or its compact form, if it is worth it."""
        codec, offloads = self.codec, self.store.offloads_from(storage.device)
        most = storage.num_bytes * 2 if offloads else storage.num_bytes // WORTH
        if flat.dtype is torch.bool:  # a view of other bytes, perhaps, and a decoded bool is 0 or 1
            flat = flat.view(torch.uint8)
        if not (flat.is_floating_point() or flat.is_complex() or codec == "raw"):
            codec = "narrow"
        if flat.is_cuda:
            packed = encode(flat, codec)
            return Frame(packed, packed.numel(), self._unpooled) if packed.numel() <= most else None
        room = buffer_bytes(flat.size(), flat.dtype, codec)
        if self._scratch.numel() < room:
            self._scratch = self._unpooled.take(room)
        num_bytes = pack_into(flat, self._scratch, codec=codec)
        if num_bytes > most:
            return None
        buffer = self._pool.take(num_bytes)
        ctypes.memmove(buffer.data_ptr(), self._scratch.data_ptr(), num_bytes)
        return Frame(buffer, num_bytes, self._pool)

    def _count(self, storage: SavedStorage, kept: int) -> None:
        with self._counting:
            self.counts.bytes_raw += storage.num_bytes
            self.counts.bytes_kept += kept


def _as_it_was(start: int, frame: Tensor, space: Space) -> Bytes:
    """Decode the frame of a storage from byte ``start`` on."""
    memory = space()
    return bytes_around(start, _decoded(frame, memory))._replace(in_slot=memory is not None)


def _expanded(expand: Callable[[Tensor, Space], Bytes], frame: Tensor, space: Space) -> Bytes:
    return expand(_decoded(frame), space)


def _decoded(frame: Tensor, memory: Tensor | None = None) -> Tensor:
    tensor = decode(frame, memory)
    assert tensor is not None, "a storage has a tensor"
    return tensor


def _bring(storages: Sequence[weakref.ref[SavedStorage]]) -> None:
    for reference in storages:
        if (storage := reference()) is not None:
            storage.bring()
