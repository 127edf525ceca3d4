"""Packs storages into a store and brings them back: what a pipeline's stage and ``penstock.offload`` share.

Runs in the memory thread; what does not shrink is left where it is, without a copy.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import weakref

import torch
from torch import Tensor

from ...compression.codec import CODECS, buffer_bytes, decode, encode, pack_into
from ...compression.errors import CodecError
from ...compression.names import AUTO
from ...compression.pool import Frame, Pool
from .held import Bytes, Held
from .host import CpuLane, CudaLane, HostStore, Lane
from .known import Shrunk
from .store import Fresh, PackedStore, Store
from .worker import Worker

STORES: dict[str, type[PackedStore]] = {"packed": PackedStore, "host": HostStore}
FOR_SAVED = "zero_value+exponent"  # "auto": at memory speed, either where a sample says that it pays
_WORTH = 16 / 15  # raw bytes per byte of frame from which on it is worth to unpack again


class Keeper:
    """One store with its codec, thread and counters.

    ``bytes_raw`` counts the storages that were to leave and whose graph still lived when it was their turn,
    ``bytes_kept`` what of them stayed (frames, and storages that did not shrink or found no room),
    ``num_packs`` and ``num_unpacks`` the work done.
    """

    def __init__(
        self,
        store: Store,
        *,
        codec: str,
        pool: Pool,
        num_ahead: int,
        budget: int | None = None,
    ) -> None:
        """Pack with ``codec`` into buffers of ``pool``, at most ``budget`` bytes of frames at a time.

        Args:    num_ahead: how many storages come back before they are asked for."""
        codec = FOR_SAVED if codec == AUTO else codec
        if codec not in tuple(CODECS):  # a tuple: what was given may have no hash
            found = f"codec is one of {', '.join((AUTO, *CODECS))}, found {codec!r}"
            raise CodecError(f"{found}; what a backward reads comes back bit for bit")
        self.store, self.codec, self.pool, self.budget = store, codec, pool, budget
        self.worker, self._num_ahead = Worker("penstock-memory"), num_ahead
        self._lanes: dict[torch.device, Lane] = {}
        self._fresh, self._counting = Fresh(), threading.Lock()
        self._scratch = self._fresh.take(0)  # of the memory thread
        self.bytes_raw = self.bytes_kept = self.num_packs = self.num_unpacks = 0

    def lane(self, device: torch.device) -> Lane:
        """Where the tensors of ``device`` are packed and unpacked."""
        if device not in self._lanes:
            self._lanes[device] = CudaLane(device) if device.type == "cuda" else CpuLane()
        return self._lanes[device]

    def pack(self, held: Held, frame: Frame | None = None, shrunk: Shrunk | None = None) -> None:
        """Move ``held`` to the store, as ``frame`` if that holds it already, as ``shrunk`` if it is known."""
        flat = held.flat()
        if flat is None:
            return self.stays(held)
        with self.lane(held.device).aside(held.mark):
            if frame is None:
                most = held.num_bytes * 2 if self.store.takes_away(held.device) else held.num_bytes // _WORTH
                frame = self._frame(flat if shrunk is None else shrunk.tensor, int(most))
                self.num_packs += frame is not None
            if frame is not None and not self._fits(frame):
                frame = frame.release()
            if frame is None:
                return self.stays(held)
            self._count(held, frame.num_bytes)
            held.expand = None if shrunk is None else shrunk.expand
            self.store.put(held.key, frame)
        held.leave()
        if held.dropped:  # meanwhile
            self.store.drop(held.key)

    def stays(self, held: Held) -> None:
        """Count ``held`` as a storage that stays as it is."""
        self._count(held, held.num_bytes)

    def unpack(self, held: Held) -> Bytes:
        """Decode the frame of ``held``; the store keeps it, so that a graph can be walked once more."""
        with self.lane(held.device).aside():
            frame = self.store.get(held.key)
            tensor = decode(frame.buffer[: frame.num_bytes])
            assert tensor is not None, "a storage has a tensor"
            with self._counting:
                self.num_unpacks += 1
            if held.expand is not None:
                return held.expand(tensor)
            storage = tensor.untyped_storage()
            return Bytes(storage, tensor.data_ptr() - storage.data_ptr() - held.shift)

    def ahead(self, held: Held) -> None:
        """Begin to bring back what was saved before ``held``: a backward asks in the reverse order."""
        before = held.before()
        for _ in range(self._num_ahead):
            if before is None:
                return
            if before.left and before.bytes is None and not before.expected:
                before.expected = True
                self.worker.offer(functools.partial(_bring, weakref.ref(before)))
            before = before.before()

    def close(self) -> None:
        """Do what is queued and end the thread."""
        self.worker.close()
        self._scratch = self._scratch[:0].clone()

    def _frame(self, flat: Tensor, most: int) -> Frame | None:
        """The frame of ``flat``, unless it is longer than ``most`` bytes."""
        codec = self.codec
        if flat.dtype is torch.bool:  # a view of other bytes, perhaps, and a decoded bool is 0 or 1
            flat = flat.view(torch.uint8)
        if not (flat.is_floating_point() or flat.is_complex() or codec == "raw"):
            codec = "narrow"
        if flat.is_cuda:
            packed = encode(flat, codec)
            return Frame(packed, packed.numel(), self._fresh) if packed.numel() <= most else None
        room = buffer_bytes(flat.size(), flat.dtype, codec)
        if self._scratch.numel() < room:
            self._scratch = self._fresh.take(room)
        num_bytes = pack_into(flat, self._scratch, codec=codec)
        if num_bytes > most:
            return None
        buffer = self.pool.take(num_bytes)
        ctypes.memmove(buffer.data_ptr(), self._scratch.data_ptr(), num_bytes)
        return Frame(buffer, num_bytes, self.pool)

    def _count(self, held: Held, kept: int) -> None:
        with self._counting:
            self.bytes_raw += held.num_bytes
            self.bytes_kept += kept

    def _fits(self, frame: Frame) -> bool:
        return self.budget is None or self.store.num_bytes + frame.num_bytes <= self.budget


def _bring(reference: weakref.ref[Held]) -> None:
    held = reference()
    if held is not None:
        held.bring_ahead()
