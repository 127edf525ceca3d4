"""Which pages hold which sample, and who still reads or writes them: what a policy decides, made true.

```
   reserve -> being written -> finish -> whole -> free -> (leased: pages stay) -> lease ends -> pages free
                    |                                |
                    +-- free: pages free at once     +-- (not leased: pages free at once)
```
Only whole entries are leased; whoever writes asks ``kept`` before every byte."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from .pages import Pages
from .policy import Entry


@dataclass(slots=True, eq=False)
class Stored:
    """A sample in the slab.

    Attributes:
        stamp:   what its writer said of it, for those who read it.
        pages:   where it lies, in order.
        written: bytes that are there.
        kept:    false once the policy gave it up.
        leases:  how many connections may be reading it.
    """

    entry: Entry
    num_bytes: int
    stamp: bytes
    pages: array[int]
    written: int = 0
    whole: bool = False
    kept: bool = True
    leases: int = 0


class Ledger:
    """All entries, and every page they lie in."""

    def __init__(self, pages: Pages) -> None:
        self.pages = pages
        self.entries: dict[Entry, Stored] = {}
        self.given_up: set[Stored] = set()
        """What the policy no longer keeps, but somebody still reads."""
        self.num_bytes = 0  # of all entries

    def whole(self, entry: Entry | None) -> Stored | None:
        """Return what is stored as ``entry`` if all of it is there."""
        stored = self.entries.get(entry) if entry is not None else None
        return stored if stored is not None and stored.whole else None

    def reserve(self, entry: Entry, num_bytes: int, stamp: bytes) -> Stored | None:
        """Give an entry its pages, to be written; None if too few are free, as somebody reads the others."""
        assert entry not in self.entries
        pages = self.pages.take(self.pages.needed(num_bytes))
        if pages is None:
            return None
        stored = self.entries[entry] = Stored(entry, num_bytes, stamp, pages)
        self.num_bytes += num_bytes
        return stored

    def finish(self, stored: Stored) -> None:
        """All bytes of an entry are there: it can be read."""
        assert stored.kept
        assert stored.written == stored.num_bytes
        stored.whole = True

    def free(self, entry: Entry) -> bool:
        """Give an entry up. Its pages are free once nobody reads them. Returns: whether there was one."""
        stored = self.entries.pop(entry, None)
        if stored is None:
            return False
        stored.kept = False
        self.num_bytes -= stored.num_bytes
        if stored.leases:
            self.given_up.add(stored)
        else:
            self.pages.give(stored.pages)
        return True

    def lease(self, stored: Stored) -> None:
        """Somebody reads an entry: its pages stay as they are until ``end``."""
        assert stored.whole
        stored.leases += 1

    def end(self, stored: Stored) -> None:
        """One who read an entry does so no longer."""
        stored.leases -= 1
        if not stored.leases and not stored.kept:
            self.given_up.remove(stored)
            self.pages.give(stored.pages)
