"""Which bytes of a file are lent and which are free: aligned extents, the smallest that fits, merged again.

No file is touched here, so that every order of taking and giving back can be tried.
Source: best fit with coalescing, Knuth, The Art of Computer Programming 1, section 2.5.
"""

from __future__ import annotations

import bisect

UNIT = 4096  # what a file system and O_DIRECT count in


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole units."""
    return -(-num_bytes // UNIT) * UNIT


class Extents:
    """The extents of one file of ``size`` bytes, in which ``lent_bytes`` are lent."""

    def __init__(self) -> None:
        """Start with a file of no bytes."""
        self.size = self.lent_bytes = 0
        self._lent: dict[int, int] = {}  # length by start
        self._free: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}  # of the free ones
        self._by_length: list[tuple[int, int]] = []  # (length, start) of the free ones, in order

    def grow(self, num_bytes: int) -> None:
        """The file is longer by so many bytes, a multiple of ``UNIT``."""
        assert num_bytes % UNIT == 0, "a file grows by whole units"
        self._add(self.size, num_bytes)
        self.size += num_bytes

    def take(self, num_bytes: int) -> int | None:
        """Lend ``num_bytes``, rounded up to units; returns where they begin, None: no room is long enough."""
        needed = aligned(num_bytes)
        place = bisect.bisect_left(self._by_length, (needed, -1))
        if place == len(self._by_length):
            return None
        length, start = self._by_length[place]
        self._remove(start)
        if length > needed:
            self._add(start + needed, length - needed)
        self._lent[start] = needed
        self.lent_bytes += needed
        return start

    def give(self, start: int) -> None:
        """Take back what ``take`` lent, and merge it with the free bytes on both sides."""
        length = self._lent.pop(start, None)
        assert length is not None, "an extent comes back once, by where it begins"
        self.lent_bytes -= length
        self._add(start, length)

    @property
    def tail(self) -> int:
        """Free bytes at the end of the file, which grow with it."""
        start = self._start_of_end.get(self.size)
        return 0 if start is None else self.size - start

    def _add(self, start: int, length: int) -> None:
        if (before := self._start_of_end.get(start)) is not None:
            length += self._remove(before)
            start = before
        if start + length in self._free:
            length += self._remove(start + length)
        self._free[start], self._start_of_end[start + length] = length, start
        bisect.insort(self._by_length, (length, start))

    def _remove(self, start: int) -> int:
        length = self._free.pop(start)
        del self._start_of_end[start + length]
        del self._by_length[bisect.bisect_left(self._by_length, (length, start))]
        return length
