"""The eviction policies by name, and the one for readers whose order nobody knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ....compression.errors import ConfigError
from .gain import Gain
from .next_use import NextUse
from .policy import MISS, ByteBudget, Decision, Entry, Job, Policy


class Lru:
    """Takes everything and evicts what was used longest ago, as a page cache does."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self._budget = capacity, ByteBudget(capacity)
        self._data: dict[str, str] = {}

    @property
    def held(self) -> Mapping[str, int]:
        """See ``Policy``."""
        return self._budget.held

    def join(self, job: Job, now: float) -> None:
        """See ``Policy``."""
        self._data[job.name] = job.data

    def leave(self, name: str, now: float) -> tuple[Entry, ...]:
        """See ``Policy``: what nobody reads any more is evicted."""
        data = self._data.pop(name, None)
        entries = [entry for entry in self._budget.entries if entry[0] == data]
        readers = [other for other, read in self._data.items() if read == data]
        if readers:
            self._budget.hand_over(name, dict.fromkeys(entries, readers[0]))
            return ()
        for entry in entries:
            self._budget.remove(entry)
        return tuple(entries)

    def begin(
        self, name: str, order: Sequence[int], following: Sequence[int] | None, now: float
    ) -> tuple[Entry, ...]:
        """See ``Policy``: orders are ignored."""
        return ()

    def use(self, name: str, index: int, now: float) -> Decision:
        """See ``Policy``."""
        entry = self._data[name], index
        if entry not in self._budget.entries:
            return MISS
        self._budget.touch(entry)
        return Decision(entry)

    def offer(self, name: str, index: int, num_bytes: int, now: float) -> Decision:
        """See ``Policy``."""
        entry, budget, evicted = (self._data[name], index), self._budget, list[Entry]()
        if entry in budget.entries:
            return Decision(entry)
        if num_bytes > self.capacity:
            return MISS
        while not budget.fits(num_bytes):
            evicted.append(next(iter(budget.entries)))
            budget.remove(evicted[-1])
        budget.add(entry, num_bytes, name)
        return Decision(entry, tuple(evicted))

    def drop(self, entry: Entry) -> None:
        """See ``Policy``."""
        self._budget.remove(entry)


POLICIES: dict[str, Callable[[int], Policy]] = {"next_use": NextUse, "gain": Gain, "lru": Lru}


def policy(name: str, capacity: int) -> Policy:
    """Return a new policy for ``capacity`` bytes.

    Raises: ConfigError: there is none of that name."""
    if name not in POLICIES:
        raise ConfigError(f"{name} is no policy of the sample cache; known are {', '.join(POLICIES)}")
    return POLICIES[name](capacity)
