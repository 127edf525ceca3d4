"""The eviction policies by name, and the one for readers whose order nobody knows."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from ....compression.errors import ConfigError
from .gain import Gain
from .next_use import NextUse
from .policy import MISS, Decision, Entry, Job, Policy


class Lru:
    """Policy that takes everything and evicts what was used longest ago, as a page cache does."""

    takes_shares = False

    def __init__(self, capacity: int, *, keep: float = 0.0) -> None:
        self.capacity, self._num_bytes, self._keep = capacity, 0, keep
        self._entries: dict[Entry, int] = {}  # bytes; what was used last comes last
        self._jobs: dict[str, Job] = {}
        self._until: dict[str, float] = {}  # of data that no job reads

    @property
    def held(self) -> Mapping[str, int]:
        """See ``Policy``: bytes of a data set count for the first job that reads it."""
        first = {job.data: job.name for job in reversed(self._jobs.values())}
        held = Counter[str]()
        for (data, _), num_bytes in self._entries.items():
            held[first.get(data, f"expected {data}")] += num_bytes
        return +held

    def join(self, job: Job, now: float) -> None:
        self._jobs[job.name] = job
        if now <= self._until.get(job.data, -math.inf):
            del self._until[job.data]

    def leave(self, name: str, now: float) -> tuple[Entry, ...]:
        """See ``Policy``: what nobody reads any more is evicted, at once or later."""
        gone, job = self._expire(now), self._jobs.pop(name, None)
        if job is not None and all(other.data != job.data for other in self._jobs.values()):
            self._until[job.data] = now + self._keep if self._keep and job.shared else -math.inf
        return gone + self._expire(now)

    def begin(
        self, name: str, order: Sequence[int], following: Sequence[int] | None, now: float
    ) -> tuple[Entry, ...]:
        """See ``Policy``: orders are ignored."""
        return self._expire(now)

    def _expire(self, now: float) -> tuple[Entry, ...]:
        over = {data for data, until in self._until.items() if until < now}
        gone = tuple(entry for entry in self._entries if entry[0] in over)
        for data in over:
            del self._until[data]
        for entry in gone:
            self.drop(entry)
        return gone

    def use(self, name: str, index: int, now: float) -> Decision:
        entry = self._jobs[name].data, index
        if entry not in self._entries:
            return MISS
        self._entries[entry] = self._entries.pop(entry)  # after all others
        return Decision(entry)

    def offer(self, name: str, index: int, num_bytes: int, now: float) -> Decision:
        entry, evicted = (self._jobs[name].data, index), list[Entry]()
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


def policy(name: str, capacity: int, *, keep: float = 0.0, last_gain: int = 1) -> Policy:
    """Return a new policy for ``capacity`` bytes.

    Args:
        keep: Seconds for which samples stay after the last job that reads their data; next_use and lru.
        last_gain: Gain of the job with the longest epoch; gain alone.

    Raises: ConfigError: there is none of that name, or it has no such setting."""
    if name not in POLICIES:
        raise ConfigError(f"{name} is no policy of the sample cache; known are {', '.join(POLICIES)}")
    if name == "gain":
        if keep:
            raise ConfigError("keep= is for policy=next_use and policy=lru, found policy=gain; leave it out")
        return Gain(capacity, last_gain=last_gain)
    if last_gain != 1:
        raise ConfigError(f"last_gain= is for policy=gain, found policy={name}; leave it out")
    return (NextUse if name == "next_use" else Lru)(capacity, keep=keep)
