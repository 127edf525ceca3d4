"""A pool of byte buffers.

Packing into a fresh buffer is six times slower than into a kept one, because of its page faults.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .frame import ALIGNMENT

_PAGE = 4096


class Pool:
    """Buffers that are lent and come back; for one thread. Nothing is freed before the pool is."""

    def __init__(self) -> None:
        """Start empty."""
        self._idle: dict[int, list[Tensor]] = {}
        self._lent: set[int] = set()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all its buffers, lent ones included."""
        return self._num_bytes

    def take(self, num_bytes: int) -> Tensor:
        """Lend a 1-D uint8 tensor of at least ``num_bytes`` bytes at a multiple of 64, not cleared."""
        size = size_class(num_bytes)
        idle = self._idle.get(size)
        buffer = idle.pop() if idle else self._new(size)
        self._lent.add(buffer.data_ptr())
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take back what ``take`` lent, itself and not a part of it."""
        assert buffer.data_ptr() in self._lent, "a buffer comes back once, to the pool that lent it"
        self._lent.remove(buffer.data_ptr())
        self._idle.setdefault(buffer.numel(), []).append(buffer)

    def _new(self, size: int) -> Tensor:
        whole = torch.empty(size + ALIGNMENT, dtype=torch.uint8)
        whole[::_PAGE] = 0  # touches every page
        self._num_bytes += size
        start = -whole.data_ptr() % ALIGNMENT
        return whole[start : start + size]


def size_class(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole pages and to one of eight steps between two powers of two."""
    step = max(_PAGE, 1 << max(0, num_bytes.bit_length() - 4))
    return max(1, -(-num_bytes // step)) * step
