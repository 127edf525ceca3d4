"""Pages of one size: a sample lies in as many as it needs, wherever they are.

So space never breaks into pieces that are too small, and what is freed is of use at once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

PAGE_BYTES = 16 * 1024


class Pages:
    """Which of ``num_pages`` pages nobody has."""

    def __init__(self, num_pages: int, page_bytes: int = PAGE_BYTES) -> None:
        self.num_pages, self.page_bytes = num_pages, page_bytes
        self._free = array("I", range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Pages that may be taken."""
        return len(self._free)

    def needed(self, num_bytes: int) -> int:
        """How many pages a sample takes; an empty one takes a page, so that none costs nothing."""
        return pages_of(num_bytes, self.page_bytes)

    def take(self, count: int) -> array[int] | None:
        """Return ``count`` pages that are now the caller's, or None if there are not as many."""
        if count > len(self._free):
            return None
        first = len(self._free) - count
        taken = self._free[first:]
        del self._free[first:]
        taken.reverse()  # what lies side by side is read in one piece
        return taken

    def give(self, pages: array[int]) -> None:
        """Take back pages that ``take`` returned."""
        self._free.extend(reversed(pages))


def pages_of(num_bytes: int, page_bytes: int) -> int:
    """How many pages of ``page_bytes`` a sample of ``num_bytes`` takes."""
    return max(1, -(-num_bytes // page_bytes))


def pieces(pages: Iterable[int], num_bytes: int, page_bytes: int, *, begin: int = 0) -> list[tuple[int, int]]:
    """Where the bytes of a sample from ``begin`` on lie in the slab: (start, end) of each piece, in order.

    Pages side by side are one piece."""
    found: list[tuple[int, int]] = []
    left = num_bytes
    for page in pages:
        size = min(left, page_bytes)
        left -= size
        start = page * page_bytes
        if begin >= size:
            begin -= size
            continue
        start, end, begin = start + begin, start + size, 0
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found
