"""Byte buffers that begin at a page, as reading past the page cache needs, kept for the next read.

Who reads a frame may keep views of it, so a buffer comes back when the last tensor that knows it is freed,
not when somebody says so.
"""

from __future__ import annotations

import mmap
import weakref

import numpy as np
import torch
from torch import Tensor

from ...compression.pool import Pool, size_class

_MOST_IDLE = 32 << 20  # bytes kept for later, a little more when two threads give at once


class PageBuffers(Pool):
    """Buffers that begin at a page and are whole pages long; new ones cost a fault a page."""

    def __init__(self, *, most_idle: int = _MOST_IDLE) -> None:
        """Start empty; at most ``most_idle`` bytes wait for the next who takes one."""
        super().__init__()
        self._pages: dict[int, list[mmap.mmap]] = {}
        self._most_idle = most_idle

    @property
    def num_idle_bytes(self) -> int:
        """Bytes of the buffers that nobody uses."""
        return sum(size * len(kept) for size, kept in list(self._pages.items()))

    def take(self, num_bytes: int) -> Tensor:
        """Lend a 1-D uint8 tensor of at least ``num_bytes`` bytes, in whole pages."""
        size = size_class(num_bytes)
        try:
            pages = self._pages[size].pop()
        except LookupError:
            pages = mmap.mmap(-1, size)
        array = np.frombuffer(pages, dtype=np.uint8)
        weakref.finalize(array, self._kept, size, pages).atexit = False
        return torch.from_numpy(array)

    def give(self, buffer: Tensor) -> None:
        """Do nothing: the buffer is back when nobody holds it."""

    def _kept(self, size: int, pages: mmap.mmap) -> None:
        if self.num_idle_bytes + size <= self._most_idle:
            self._pages.setdefault(size, []).append(pages)
