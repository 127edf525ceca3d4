"""What lies in a cache, in bytes and by who had it admitted; here a policy is held to its capacity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ....compression.errors import ConfigError
from .policy import Entry


class Shelf:
    """Entries with their bytes, never more than ``capacity`` together.

    Attributes: num_bytes: of all entries."""

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ConfigError(f"a cache holds 0 bytes or more, found {capacity}")
        self.capacity, self.num_bytes = capacity, 0
        self._entries: dict[Entry, tuple[int, str]] = {}
        self._held: dict[str, int] = {}

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes by the name of the job that had them admitted; jobs without any are not named."""
        return MappingProxyType(self._held)

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def fits(self, num_bytes: int) -> bool:
        """Whether so many bytes more have room."""
        return self.num_bytes + num_bytes <= self.capacity

    def size(self, entry: Entry) -> int:
        """The bytes of an entry that is there."""
        return self._entries[entry][0]

    def by(self, entry: Entry) -> str:
        """Who had an entry admitted that is there."""
        return self._entries[entry][1]

    def put(self, entry: Entry, num_bytes: int, name: str) -> None:
        """Lay down an entry that is not there, and fits."""
        assert entry not in self._entries
        assert self.fits(num_bytes)
        self._entries[entry] = (num_bytes, name)
        self.num_bytes += num_bytes
        self._held[name] = self._held.get(name, 0) + num_bytes

    def take(self, entry: Entry) -> int:
        """Take away an entry; its bytes, 0 if it was not there."""
        num_bytes, name = self._entries.pop(entry, (0, ""))
        self.num_bytes -= num_bytes
        self._less(name, num_bytes)
        return num_bytes

    def hand(self, entry: Entry, name: str) -> None:
        """Count an entry for another job: the one that had it admitted has left."""
        num_bytes, before = self._entries[entry]
        self._entries[entry] = (num_bytes, name)
        self._less(before, num_bytes)
        self._held[name] = self._held.get(name, 0) + num_bytes

    def of(self, owner: str) -> tuple[Entry, ...]:
        """The entries that belong to a data set, or to a job where entries belong to jobs."""
        return tuple(entry for entry in self._entries if entry[0] == owner)

    def admitted_by(self, name: str) -> tuple[Entry, ...]:
        """The entries that a job had admitted."""
        return tuple(entry for entry, (_, by) in self._entries.items() if by == name)

    def clear(self, entries: Iterable[Entry]) -> tuple[Entry, ...]:
        """Take away ``entries``; those that were there."""
        gone = tuple(entry for entry in entries if entry in self._entries)
        for entry in gone:
            self.take(entry)
        return gone

    def _less(self, name: str, num_bytes: int) -> None:
        if name in self._held:
            self._held[name] -= num_bytes
            if not self._held[name]:
                del self._held[name]
