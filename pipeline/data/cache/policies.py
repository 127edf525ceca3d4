"""The eviction policies by name, and the one for readers whose order nobody knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ....compression.errors import ConfigError
from .gain import Gain
from .next_use import NextUse
from .policy import MISS, Decision, Entry, Job, Policy


class Lru:
    """Policy that takes everything and evicts what was used longest ago, as a page cache does."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self._num_bytes = capacity, 0
        self._entries: dict[Entry, int] = {}  # bytes; what was used last comes last
        self._data: dict[str, str] = {}

    @property
    def held(self) -> Mapping[str, int]:
        """See ``Policy``: bytes of a data set count for the first job that reads it."""
        first = {data: name for name, data in reversed(self._data.items())}
        held = dict.fromkeys(first.values(), 0)
        for (data, _), num_bytes in self._entries.items():
            held[first[data]] += num_bytes
        return {name: num_bytes for name, num_bytes in held.items() if num_bytes}

    def join(self, job: Job, now: float) -> None:
        self._data[job.name] = job.data

    def leave(self, name: str, now: float) -> tuple[Entry, ...]:
        """See ``Policy``: what nobody reads any more is evicted."""
        data = self._data.pop(name, None)
        gone = () if data in self._data.values() else tuple(one for one in self._entries if one[0] == data)
        for entry in gone:
            self.drop(entry)
        return gone

    def begin(
        self, name: str, order: Sequence[int], following: Sequence[int] | None, now: float
    ) -> tuple[Entry, ...]:
        """See ``Policy``: orders are ignored."""
        return ()

    def use(self, name: str, index: int, now: float) -> Decision:
        entry = self._data[name], index
        if entry not in self._entries:
            return MISS
        self._entries[entry] = self._entries.pop(entry)  # after all others
        return Decision(entry)

    def offer(self, name: str, index: int, num_bytes: int, now: float) -> Decision:
        entry, evicted = (self._data[name], index), list[Entry]()
        if entry in self._entries:
            return Decision(entry)
        if num_bytes > self.capacity:
            return MISS
        while self._num_bytes + num_bytes > self.capacity:
            evicted.append(next(iter(self._entries)))
            self.drop(evicted[-1])
        self._entries[entry] = num_bytes
        self._num_bytes += num_bytes
        return Decision(entry, tuple(evicted))

    def drop(self, entry: Entry) -> None:
        self._num_bytes -= self._entries.pop(entry, 0)


POLICIES: dict[str, Callable[[int], Policy]] = {"next_use": NextUse, "gain": Gain, "lru": Lru}


def policy(name: str, capacity: int) -> Policy:
    """Return a new policy for ``capacity`` bytes.

    Raises: ConfigError: there is none of that name."""
    if name not in POLICIES:
        raise ConfigError(f"{name} is no policy of the sample cache; known are {', '.join(POLICIES)}")
    return POLICIES[name](capacity)
