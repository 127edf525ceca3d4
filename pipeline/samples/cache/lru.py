"""The policy for readers whose order nobody knows: what was used longest ago leaves, as in a page cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from ....compression.errors import ConfigError
from .policy import Admitted, Entry, Found, Job
from .shelf import Shelf


class Lru:
    """Takes everything, and drops what was used longest ago. A permutation comes back to what just left."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self._shelf = capacity, Shelf(capacity)
        self._jobs: dict[str, Job] = {}
        self._recent: OrderedDict[Entry, None] = OrderedDict()

    @property
    def held(self) -> Mapping[str, int]:
        """See ``Policy``."""
        return self._shelf.held

    def join(self, job: Job, now: float) -> None:
        """See ``Policy``."""
        self._jobs[job.name] = job

    def leave(self, name: str, now: float) -> tuple[Entry, ...]:
        """See ``Policy``: what nobody reads any more is no longer kept."""
        job = self._jobs.pop(name, None)
        if job is None:
            return ()
        readers = [other for other in self._jobs.values() if other.data == job.data]
        if not readers:
            return self._clear(self._shelf.of(job.data))
        for entry in self._shelf.admitted_by(name):
            self._shelf.hand(entry, readers[0].name)
        return ()

    def begin(
        self, name: str, order: Sequence[int], following: Sequence[int] | None, now: float
    ) -> tuple[Entry, ...]:
        """See ``Policy``: an order is not looked at."""
        return ()

    def use(self, name: str, index: int, now: float) -> Found:
        """See ``Policy``."""
        entry = self._entry(name, index)
        if entry not in self._shelf:
            return Found(None)
        self._recent.move_to_end(entry)
        return Found(entry)

    def offer(self, name: str, index: int, num_bytes: int, now: float) -> Admitted:
        """See ``Policy``."""
        entry, freed = self._entry(name, index), list[Entry]()
        if entry in self._shelf:
            return Admitted(entry)
        if not 0 <= num_bytes <= self.capacity:
            return Admitted(None)
        while not self._shelf.fits(num_bytes):
            oldest, _ = self._recent.popitem(last=False)
            self._shelf.take(oldest)
            freed.append(oldest)
        self._shelf.put(entry, num_bytes, name)
        self._recent[entry] = None
        return Admitted(entry, tuple(freed))

    def drop(self, entry: Entry) -> None:
        """See ``Policy``."""
        self._clear((entry,))

    def _entry(self, name: str, index: int) -> Entry:
        return joined(self._jobs, name).data, index

    def _clear(self, entries: Sequence[Entry]) -> tuple[Entry, ...]:
        for entry in entries:
            self._recent.pop(entry, None)
        return self._shelf.clear(entries)


def joined(jobs: Mapping[str, Job], name: str) -> Job:
    """The job of a name. Raises: ConfigError: none of that name has joined."""
    try:
        return jobs[name]
    except KeyError:
        raise ConfigError(f"a job joins before it uses samples, {name} has not; join first") from None
