"""The eviction policies by name, and the one for readers whose order nobody knows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....compression.errors import ConfigError
from .gain import Gain
from .next_use import NextUse
from .policy import MISS, ByteBudget, Decision, Entry, Job, Policy


class Lru(ByteBudget):
    """Policy that takes everything and evicts what was used longest ago, as a page cache does."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._data: dict[str, str] = {}

    def join(self, job: Job, now: float) -> None:
        """See ``Policy``."""
        self._data[job.name] = job.data

    def leave(self, name: str, now: float) -> tuple[Entry, ...]:
        """See ``Policy``: what nobody reads any more is evicted."""
        data = self._data.pop(name, None)
        entries = tuple(entry for entry in self.entries if entry[0] == data)
        if heir := next((other for other, read in self._data.items() if read == data), None):
            self.hand_over(name, dict.fromkeys(entries, heir))
            return ()
        for entry in entries:
            self.drop(entry)
        return entries

    def begin(
        self, name: str, order: Sequence[int], following: Sequence[int] | None, now: float
    ) -> tuple[Entry, ...]:
        """See ``Policy``: orders are ignored."""
        return ()

    def use(self, name: str, index: int, now: float) -> Decision:
        """See ``Policy``."""
        entry = self._data[name], index
        if entry not in self.entries:
            return MISS
        self.entries[entry] = self.entries.pop(entry)  # after all others
        return Decision(entry)

    def offer(self, name: str, index: int, num_bytes: int, now: float) -> Decision:
        """See ``Policy``."""
        entry, evicted = (self._data[name], index), list[Entry]()
        if entry in self.entries:
            return Decision(entry)
        if num_bytes > self.capacity:
            return MISS
        while not self.fits(num_bytes):
            evicted.append(next(iter(self.entries)))
            self.drop(evicted[-1])
        self.add(entry, num_bytes, name)
        return Decision(entry, tuple(evicted))


POLICIES: dict[str, Callable[[int], Policy]] = {"next_use": NextUse, "gain": Gain, "lru": Lru}


def policy(name: str, capacity: int) -> Policy:
    """Return a new policy for ``capacity`` bytes.

    Raises: ConfigError: there is none of that name."""
    if name not in POLICIES:
        raise ConfigError(f"{name} is no policy of the sample cache; known are {', '.join(POLICIES)}")
    return POLICIES[name](capacity)
