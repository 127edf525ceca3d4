"""The eviction policies by name, and the one for readers whose order nobody knows."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from ....compression.errors import ConfigError
from .gain import Gain
from .next_use import NextUse
from .policy import MISS, Decision, Entry, Job, Policy


class Lru:
    """Policy that takes everything and evicts what was used longest ago, as a page cache does.

    Samples stay for ``keep`` seconds after the last job that reads their data has left."""

    takes_shares = False

    def __init__(self, capacity: int, *, keep: float = 0.0) -> None:
        self.capacity, self._num_bytes, self._keep = capacity, 0, keep
        self._entries: dict[Entry, int] = {}  # bytes; what was used last comes last
        self._data: dict[str, str] = {}  # by job
        self._until: dict[str, float] = {}  # of data that no job reads
        self._private: set[str] = set()  # data that no other job can name

    @property
    def held(self) -> Mapping[str, int]:
        """See ``Policy``: bytes of a data set count for the first job that reads it."""
        first = {data: name for name, data in reversed(self._data.items())}
        held: dict[str, int] = {}
        for (data, _), num_bytes in self._entries.items():
            name = first.get(data, f"expected {data}")
            held[name] = held.get(name, 0) + num_bytes
        return {name: num_bytes for name, num_bytes in held.items() if num_bytes}

    def join(self, job: Job, now: float) -> None:
        self._data[job.name] = job.data
        if not job.shared:
            self._private.add(job.data)
        elif now <= self._until.get(job.data, -math.inf):
            del self._until[job.data]

    def leave(self, name: str, now: float) -> tuple[Entry, ...]:
        """See ``Policy``: what nobody reads any more is evicted, at once or later."""
        gone, data = self._expire(now), self._data.pop(name, None)
        if data is None or data in self._data.values():
            return gone
        if not self._keep or data in self._private:
            self._private.discard(data)
            return gone + self._evict({data})
        self._until[data] = now + self._keep
        return gone

    def begin(
        self, name: str, order: Sequence[int], following: Sequence[int] | None, now: float
    ) -> tuple[Entry, ...]:
        """See ``Policy``: orders are ignored."""
        return self._expire(now)

    def _expire(self, now: float) -> tuple[Entry, ...]:
        over = {data for data, until in self._until.items() if until < now}
        for data in over:
            del self._until[data]
        return self._evict(over)

    def _evict(self, data: Collection[str]) -> tuple[Entry, ...]:
        gone = tuple(entry for entry in self._entries if entry[0] in data)
        for entry in gone:
            self.drop(entry)
        return gone

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


POLICIES = ("next_use", "gain", "lru")


def policy(name: str, capacity: int, *, keep: float = 0.0, last_gain: int | None = None) -> Policy:
    """Return a new policy for ``capacity`` bytes.

    Args:
        keep: Seconds for which samples stay behind the last job that reads their data; next_use and lru.
        last_gain: Gain of the job with the longest epoch, None as of the others; gain alone.

    Raises: ConfigError: there is none of that name, or it has no such setting."""
    if name not in POLICIES:
        raise ConfigError(f"{name} is no policy of the sample cache; known are {', '.join(POLICIES)}")
    if name == "gain":
        if keep:
            raise ConfigError("keep= is for policy=next_use and policy=lru, found policy=gain; leave it out")
        return Gain(capacity, last_gain=last_gain)
    if last_gain is not None:
        raise ConfigError(f"last_gain= is for policy=gain, found policy={name}; leave it out")
    return (NextUse if name == "next_use" else Lru)(capacity, keep=keep)
