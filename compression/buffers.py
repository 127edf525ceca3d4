"""Memory that frames and tensors are made in: new, the caller's, or a buffer of a pool.

Every tensor starts at the address mod 64 that its header says, so memory begins at a multiple of 64. Long
memory is new to the process each time, and its page faults take longer than the packing: so the system is
asked for huge pages, as NumPy asks, and what is behind a frame is given back page by page, not by a copy.
Packing into a fresh buffer is six times slower than into a kept one, so a pool keeps them.

Source: madvise(2), MADV_HUGEPAGE and MADV_DONTNEED.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .errors import CodecError
from .frame import ALIGNMENT, check_memory
from .names import HOST

_CPU = torch.device("cpu")
SMALL_BYTES = 1 << 18  # up to here a frame is made in kept memory and copied out: memory is taken once
_LARGE_BYTES = 16 << 20


def lent(buffer: Tensor, needed: int, item_bytes: int) -> tuple[torch.UntypedStorage, int]:
    """The caller's memory for a tensor: a storage, and where in it the buffer begins."""
    check_memory(buffer)
    first = int(buffer.storage_offset())
    if buffer.numel() < needed or buffer.data_ptr() % ALIGNMENT or first % item_bytes:
        found = f"{buffer.numel()} bytes at {buffer.data_ptr() % ALIGNMENT} mod {ALIGNMENT}"
        raise CodecError(f"this tensor needs {needed} bytes at a multiple of {ALIGNMENT}, found {found}")
    return buffer.untyped_storage(), first


def memory(num_bytes: int, device: torch.device = _CPU) -> tuple[torch.UntypedStorage, int]:
    """New memory, and where in it a multiple of 64 is.

    A storage is left as it is where deterministic algorithms would fill ``torch.empty``.
    """
    try:
        # Torch's own memory begins at such a multiple; a size that others ask for too is found again sooner.
        storage = torch.UntypedStorage(num_bytes or ALIGNMENT, device=device)
        if storage.data_ptr() % ALIGNMENT:
            storage = torch.UntypedStorage(num_bytes + ALIGNMENT, device=device)
    except RuntimeError as error:
        raise CodecError(f"a frame needs {num_bytes} bytes of memory, there is none: {error}") from error
    address = storage.data_ptr()
    if num_bytes >= _LARGE_BYTES and device == _CPU and sys.platform == "linux":
        _advise(address, num_bytes, mmap.MADV_HUGEPAGE)
    return storage, -address % ALIGNMENT


def new_bytes(num_bytes: int, device: torch.device = _CPU) -> Tensor:
    """New memory as a 1-D uint8 tensor."""
    storage, first = memory(num_bytes, device)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, first, (num_bytes,), (1,))


def view_at(address: int, num_bytes: int) -> memoryview:
    """The bytes at an address, which somebody else keeps alive."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def cut(whole: Tensor, length: int, *, of: int) -> Tensor:
    """The first ``length`` bytes of a frame's room of ``of`` bytes, which keep no other memory.

    Args:    whole: from ``new_bytes``, or a thread's ``Scratch``, which is copied.
    """
    if of > SMALL_BYTES:
        if length * 9 >= of * 8:
            return whole[:length]
        if of >= _LARGE_BYTES and sys.platform == "linux":
            if _advise(whole.data_ptr() + length, of - length, mmap.MADV_DONTNEED):
                return whole[:length]
    frame = new_bytes(length)
    ctypes.memmove(frame.data_ptr(), whole.data_ptr(), length)
    return frame


def _advise(address: int, num_bytes: int, advice: int) -> bool:
    """Tell the system what the whole pages of a range are for; returns whether it took the advice."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = (address + num_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    return num_bytes <= 0 or not _madvise()(first, num_bytes, advice)


@lru_cache(maxsize=1)
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


_PAGE = 4096


class Pool:
    """Buffers that are lent and come back, from any thread. Nothing is freed before the pool is.

    No lock is needed: whatever threads share is changed by one call of a list or dict, which is atomic."""

    def __init__(self) -> None:
        self._idle: dict[int, list[Tensor]] = {}
        self._lent: dict[int, int] = {}  # sizes by identity, which is one while the buffer lives
        self._sizes: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all its buffers, lent ones included."""
        return sum(self._sizes)

    def take(self, num_bytes: int) -> Tensor:
        """Lend a 1-D uint8 tensor of at least ``num_bytes`` bytes at a multiple of 64, not cleared."""
        size = size_class(num_bytes)
        try:
            buffer = self._idle[size].pop()
        except LookupError:
            buffer = self._larger(size)
        self._lent[id(buffer)] = buffer.numel()
        return buffer

    def turn(self) -> None:
        """A step ended: what is taken from now on may repeat it."""

    def _larger(self, size: int) -> Tensor:
        """An idle buffer of up to twice the size, since frames of one tensor differ; else a new one."""
        for other in sorted(list(self._idle)):
            if size < other <= 2 * size:
                with contextlib.suppress(LookupError):
                    return self._idle[other].pop()
        return self._new(size)

    def give(self, buffer: Tensor) -> None:
        """Take back what ``take`` lent, itself and not a part of it."""
        size = self._lent.pop(id(buffer), None)
        assert size is not None, "a buffer comes back once, to the pool that lent it"
        self._idle.setdefault(size, []).append(buffer)

    def _new(self, size: int) -> Tensor:
        whole = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=HOST)  # whatever the default is
        check_memory(whole)  # once: who packs into what a pool lent does not look again
        whole[::_PAGE] = 0  # touches every page
        self._sizes.append(size)
        start = -whole.data_ptr() % ALIGNMENT
        return whole[start : start + size]


class Frame:
    """A packed tensor in a lent buffer: the wire, the next stage and the store hold one and the same.

    The first ``num_bytes`` bytes of ``buffer``, which ``pool`` lent, are the frame (0: not read). The last
    ``release`` gives the buffer back; there is one holder at first.
    """

    __slots__ = ("_holders", "buffer", "num_bytes", "pool")

    def __init__(self, buffer: Tensor, num_bytes: int, pool: Pool) -> None:
        self.buffer, self.num_bytes, self.pool = buffer, num_bytes, pool
        self._holders = [True]  # one entry each, the first True: whoever takes that out is the last

    @property
    def bytes(self) -> Tensor:
        """The frame itself, 1-D uint8."""
        return self.buffer[: self.num_bytes]

    def hold(self) -> Frame:
        """Keep the frame for one holder more; returns it."""
        assert self._holders, "a released frame is gone"
        self._holders.append(False)
        return self

    def release(self) -> None:
        """Let go of the frame, once per holder."""
        assert self._holders, "a frame is released once per holder"
        if self._holders.pop():
            self.pool.give(self.buffer)


class Scratch(threading.local):
    """Memory of a thread for what lies between two steps of a codec; it grows and is never given back."""

    def __init__(self) -> None:
        self._buffer = new_bytes(0)

    def buffer(self, num_bytes: int) -> Tensor:
        """At least ``num_bytes`` bytes of this thread, at a multiple of 64, until it asks again."""
        if self._buffer.numel() < num_bytes:
            self._buffer = new_bytes(0)  # what it holds goes first, or both would be there at once
            self._buffer = new_bytes(size_class(num_bytes))
        return self._buffer

    def address(self, num_bytes: int) -> int:
        """Return the address of the ``buffer`` of so many bytes."""
        return self.buffer(num_bytes).data_ptr()


@lru_cache(maxsize=1024)
def size_class(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole pages and to one of eight steps between two powers of two."""
    step = max(_PAGE, 1 << max(0, num_bytes.bit_length() - 4))
    return max(1, -(-num_bytes // step)) * step


def no_memory(error: Exception) -> CodecError:
    """Error for memory to unpack in that could not be had."""
    rule = "a frame is unpacked in memory that this machine has"
    return CodecError(f"{rule}, found {type(error).__name__}: {error}; free some of it")
