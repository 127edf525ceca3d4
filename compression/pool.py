"""A pool of byte buffers.

Packing into a fresh buffer is six times slower than into a kept one, because of its page faults.
"""

from __future__ import annotations

import contextlib
import functools
import threading

import torch
from torch import Tensor

from .frame import ALIGNMENT, check_memory
from .memory import new_bytes
from .names import HOST

_PAGE = 4096


class Pool:
    """Buffers that are lent and come back, from any thread. Nothing is freed before the pool is.

    No lock is needed: whatever threads share is changed by one call of a list or dict, which is atomic."""

    def __init__(self) -> None:
        """Start empty."""
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
            if buffer is None:
                buffer = self._new(size)
        self._lent[id(buffer)] = buffer.numel()
        return buffer

    def turn(self) -> None:
        """A step ended: what is taken from now on may repeat it."""

    def _larger(self, size: int) -> Tensor | None:
        """An idle buffer of up to twice the size: frames of one tensor are not always as long."""
        for other in sorted(list(self._idle)):
            if size < other <= 2 * size:
                with contextlib.suppress(LookupError):
                    return self._idle[other].pop()
        return None

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

    Made with one holder; the last ``release`` gives the buffer back to its pool.
    """

    __slots__ = ("_holders", "buffer", "num_bytes", "pool")

    def __init__(self, buffer: Tensor, num_bytes: int, pool: Pool) -> None:
        """Hold ``buffer``, lent by ``pool``, whose first ``num_bytes`` bytes are the frame (0: not read)."""
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
        """Start without memory."""
        self._buffer = new_bytes(0)

    def buffer(self, num_bytes: int) -> Tensor:
        """At least ``num_bytes`` bytes of this thread, at a multiple of 64, until it asks again."""
        if self._buffer.numel() < num_bytes:
            self._buffer = new_bytes(0)  # what it holds goes first, or both would be there at once
            self._buffer = new_bytes(size_class(num_bytes))
        return self._buffer

    def address(self, num_bytes: int) -> int:
        """Where the ``buffer`` of so many bytes is."""
        return self.buffer(num_bytes).data_ptr()


@functools.lru_cache(maxsize=1024)
def size_class(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole pages and to one of eight steps between two powers of two."""
    step = max(_PAGE, 1 << max(0, num_bytes.bit_length() - 4))
    return max(1, -(-num_bytes // step)) * step
