"""The policies that look at no order: least recently used, never evict, and equal parts.

What others do, to be compared with: LRU is Alluxio's and a page cache's, never evict is MinIO's (Mohan et
al., Analyzing and Mitigating Data Stalls in DNN Training, VLDB 2021), with parts of its own for each job or
without."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from ....compression.errors import ConfigError
from .policy import Admitted, Entry, Found, Job
from .shelf import Shelf

_NOWHERE, _REFUSED = Found(None), Admitted(None)


class NeverEvict:
    """Takes what fits, and keeps it while a job reads its data. Of one job no policy hits more."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self._shelf = capacity, Shelf(capacity)
        self._jobs: dict[str, Job] = {}

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
        return Found(entry) if entry in self._shelf else _NOWHERE

    def offer(self, name: str, index: int, num_bytes: int, now: float) -> Admitted:
        """See ``Policy``."""
        entry = self._entry(name, index)
        if entry in self._shelf:
            return Admitted(entry)
        if num_bytes < 0 or not self._shelf.fits(num_bytes):
            return _REFUSED
        self._shelf.put(entry, num_bytes, name)
        return Admitted(entry)

    def drop(self, entry: Entry) -> None:
        """See ``Policy``."""
        self._clear((entry,))

    def _entry(self, name: str, index: int) -> Entry:
        return joined(self._jobs, name).data, index

    def _clear(self, entries: Sequence[Entry]) -> tuple[Entry, ...]:
        return self._shelf.clear(entries)


class Lru(NeverEvict):
    """Takes everything, and lets go what was used longest ago. A permutation comes back to what just left."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._recent: OrderedDict[Entry, None] = OrderedDict()

    def use(self, name: str, index: int, now: float) -> Found:
        """See ``Policy``."""
        found = super().use(name, index, now)
        if found.entry is not None:
            self._recent.move_to_end(found.entry)
        return found

    def offer(self, name: str, index: int, num_bytes: int, now: float) -> Admitted:
        """See ``Policy``."""
        gone = []
        if self._entry(name, index) not in self._shelf and 0 <= num_bytes <= self.capacity:
            while not self._shelf.fits(num_bytes):
                oldest, _ = self._recent.popitem(last=False)
                self._shelf.take(oldest)
                gone.append(oldest)
        admitted = super().offer(name, index, num_bytes, now)
        if admitted.entry is not None:
            self._recent[admitted.entry] = None
        return Admitted(admitted.entry, tuple(gone))

    def _clear(self, entries: Sequence[Entry]) -> tuple[Entry, ...]:
        for entry in entries:
            self._recent.pop(entry, None)
        return super()._clear(entries)


class StaticSplit(NeverEvict):
    """Each job has an equal part of its own and never evicts in it; what two jobs read is there twice.

    Parts are smaller when a job comes; what is then too much stays until somebody has room coming to it."""

    def leave(self, name: str, now: float) -> tuple[Entry, ...]:
        """See ``Policy``."""
        self._jobs.pop(name, None)
        return self._clear(self._shelf.of(name))

    def offer(self, name: str, index: int, num_bytes: int, now: float) -> Admitted:
        """See ``Policy``."""
        if self._entry(name, index) in self._shelf:
            return super().offer(name, index, num_bytes, now)
        part = self.capacity // len(self._jobs)
        if num_bytes < 0 or self._shelf.held.get(name, 0) + num_bytes > part:
            return _REFUSED
        gone: list[Entry] = []
        while not self._shelf.fits(num_bytes):
            over = next(other for other, held in self._shelf.held.items() if held > part)
            for entry in reversed(self._shelf.of(over)):
                if self._shelf.held.get(over, 0) <= part or self._shelf.fits(num_bytes):
                    break
                gone += self._clear((entry,))
        return Admitted(super().offer(name, index, num_bytes, now).entry, tuple(gone))

    def _entry(self, name: str, index: int) -> Entry:
        return joined(self._jobs, name).name, index


def joined(jobs: Mapping[str, Job], name: str) -> Job:
    """The job of a name. Raises: ConfigError: none of that name has joined."""
    try:
        return jobs[name]
    except KeyError:
        raise ConfigError(f"a job joins before it uses samples, {name} has not; join first") from None
