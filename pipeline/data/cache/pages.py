"""Pages of the shared memory, and which sample lies in which: what a policy decides, made true.

A sample takes as many pages of one size as it needs, wherever they are, so space never breaks into pieces
that are too small, and what is freed is of use at once.

```
   reserve -> being written -> whole -> free -> (leased: pages stay) -> lease ends -> pages free
                    |                    |
                    +-- free             +-- (not leased): pages free at once
```
Only whole entries are leased; a writer checks ``kept`` before every byte."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from .policy import Entry

PAGE_BYTES = 16 * 1024


@dataclass(slots=True, eq=False)
class Stored:
    """A sample in the shared memory.

    Attributes:
        stamp: Bytes that its writer gave it, for those who read it.
        pages: Numbers of its pages, in order.
        written: Number of bytes that have come.
        kept: False once the policy evicted it.
        leases: Number of connections that may be reading it.
    """

    entry: Entry
    num_bytes: int
    stamp: bytes
    pages: array[int]
    written: int = 0
    kept: bool = True
    leases: int = 0

    @property
    def whole(self) -> bool:
        """True if all of it has come, so that it can be read."""
        return self.written == self.num_bytes


class Pages:
    """All entries, and ``num_pages`` pages of ``page_bytes``.

    Attributes:
        given_up: Entries that are evicted, but somebody still reads.
        num_bytes: Of all entries.
    """

    def __init__(self, num_pages: int, page_bytes: int = PAGE_BYTES) -> None:
        self.num_pages, self.page_bytes, self.num_bytes = num_pages, page_bytes, 0
        self.entries: dict[Entry, Stored] = {}
        self.given_up: set[Stored] = set()
        self._free = array("I", range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Number of pages that nobody has."""
        return len(self._free)

    def whole(self, entry: Entry | None) -> Stored | None:
        """Return an entry if all of it is there."""
        stored = self.entries.get(entry) if entry is not None else None
        return stored if stored is not None and stored.whole else None

    def reserve(self, entry: Entry, num_bytes: int, stamp: bytes) -> Stored | None:
        """Give an entry its pages, to be written; None if too few are free, as others are being read."""
        assert entry not in self.entries
        first = len(self._free) - pages_of(num_bytes, self.page_bytes)
        if first < 0:
            return None
        pages = self._free[first:]
        pages.reverse()  # pages side by side are read in one piece
        del self._free[first:]
        stored = self.entries[entry] = Stored(entry, num_bytes, stamp, pages)
        self.num_bytes += num_bytes
        return stored

    def free(self, entry: Entry) -> None:
        """Give an entry up, if there is one. Its pages are free once nobody reads them."""
        stored = self.entries.pop(entry, None)
        if stored is None:
            return
        stored.kept = False
        self.num_bytes -= stored.num_bytes
        if stored.leases:
            self.given_up.add(stored)
        else:
            self._free.extend(reversed(stored.pages))

    def lease(self, stored: Stored) -> None:
        """Begin to read an entry: its pages stay as they are until ``end_lease``."""
        assert stored.whole
        stored.leases += 1

    def end_lease(self, stored: Stored) -> None:
        """End one lease of an entry."""
        stored.leases -= 1
        if not stored.leases and not stored.kept:
            self.given_up.remove(stored)
            self._free.extend(reversed(stored.pages))


def pages_of(num_bytes: int, page_bytes: int) -> int:
    """Number of pages of a sample; an empty one takes a page, so that none costs nothing."""
    return max(1, -(-num_bytes // page_bytes))


def pieces(pages: Iterable[int], num_bytes: int, page_bytes: int, *, begin: int = 0) -> list[tuple[int, int]]:
    """Return (start, end) in the shared memory of each piece of a sample's bytes from ``begin`` on, in order.

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
