"""The default policy: the samples that will be used soonest stay, by the predicted time of their next use.

It has the inputs of ``gain`` (two known orders; seconds of an epoch) and applies Belady's rule
to them (A study of replacement algorithms, 1966): the sample that is used last is evicted, and one that is
used later still is not admitted. The next use is predicted as now + positions until then x T_i / N_i, the
soonest among the jobs that read the data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from .policy import MISS, NEVER, ByteBudget, Decision, Entry, Job, JobProgress


class Reader(JobProgress):
    """A job and the cached samples that it is the next to use.

    Attributes:
        heap: (minus position, sample, serial number), the last used first; some items are outdated.
        sharers: All readers of the same data, this one among them.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.heap: list[tuple[int, int, int]] = []
        self.sharers: list[Reader] = []


class Use(NamedTuple):
    """Predicted next use of a sample; the serial number tells the valid item of a heap."""

    reader: Reader
    position: int
    serial: int = 0


class EvictionQueue:
    """Entries by their next use: a heap for each job, keyed by position.

    Positions do not change while a job goes on, faster or slower than predicted, so the samples of a job keep
    their order, and only the last of each job are compared by time. Where several jobs read a sample, another
    may come to use it first; that is checked when the sample is the last.

    Attributes:
        pace: Seconds of a sample, for jobs without a pace.
    """

    def __init__(self) -> None:
        self.pace = 1.0
        self.uses: dict[Entry, Use] = {}
        self._serial = 0

    def time_of(self, use: Use, now: float) -> float:
        """Predicted time of a use."""
        return use.reader.time_of(use.position, now, self.pace)

    def soonest(self, sharers: Iterable[Reader], index: int, now: float) -> Use | None:
        """Return the soonest next use of a sample by one of its readers."""
        soonest, time = None, 0.0
        for reader in sharers:
            position = reader.next_use(index)
            if position != NEVER:
                when = reader.time_of(position, now, self.pace)
                if soonest is None or when < time:
                    soonest, time = Use(reader, position), when
        return soonest

    def push(self, entry: Entry, use: Use) -> None:
        """Add an entry that is not in the queue."""
        self._serial += 1
        self.uses[entry] = use._replace(serial=self._serial)
        heap = use.reader.heap
        heappush(heap, (-use.position, entry[1], self._serial))
        if len(heap) > 64 + 4 * len(self.uses):  # most of it is outdated
            heap[:] = [item for item in heap if self._is_valid(use.reader, item)]
            heapify(heap)

    def last(self, readers: Iterable[Reader], now: float) -> tuple[Entry, float] | None:
        """Return the entry that is used last, and when."""
        while True:
            last, time = None, 0.0
            for reader in readers:
                while reader.heap and not self._is_valid(reader, reader.heap[0]):
                    heappop(reader.heap)
                if reader.heap:
                    when = reader.time_of(-reader.heap[0][0], now, self.pace)
                    if last is None or when > time:
                        last, time = reader, when
            if last is None:
                return None
            entry = last.job.data, last.heap[0][1]
            sooner = self.soonest(last.sharers, entry[1], now) if len(last.sharers) > 1 else None
            if sooner is None or sooner.reader is last:
                return entry, time
            self.push(entry, sooner)

    def _is_valid(self, reader: Reader, item: tuple[int, int, int]) -> bool:
        use = self.uses.get((reader.job.data, item[1]))
        return use is not None and use.serial == item[2]


class NextUse(ByteBudget):
    """See the module."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._queue, self._readers = EvictionQueue(), dict[str, Reader]()

    def join(self, job: Job, now: float) -> None:
        """See ``Policy``."""
        if job.name in self._readers:
            self._readers[job.name].update(job)
        else:
            self._readers[job.name] = Reader(job)
        self._regroup()

    def leave(self, name: str, now: float) -> tuple[Entry, ...]:
        """See ``Policy``: samples that others use are charged to them."""
        reader = self._readers.pop(name, None)
        if reader is None:
            return ()
        self._regroup()
        reader.sharers = [other for other in reader.sharers if other is not reader]
        evicted = self._requeue(reader, now)
        self.hand_over(name, {entry: use.reader.job.name for entry, use in self._queue.uses.items()})
        return evicted

    def begin(
        self, name: str, order: Sequence[int], following: Sequence[int] | None, now: float
    ) -> tuple[Entry, ...]:
        """See ``Policy``: cached samples keep their positions, unless the epoch is not the announced one."""
        reader = self._readers[name]
        evicted = () if reader.begin(order, following, now) else self._requeue(reader, now)
        self._regroup()
        return evicted

    def use(self, name: str, index: int, now: float) -> Decision:
        """See ``Policy``."""
        reader = self._readers[name]
        reader.use(index, now)
        entry = reader.job.data, index
        use = self._queue.uses.get(entry)
        if use is None:
            return MISS
        # If another job uses it next, it does so as before.
        stays = use.reader is not reader or self._predict(entry, reader, now)
        return Decision(entry, () if stays else (entry,))

    def offer(self, name: str, index: int, num_bytes: int, now: float) -> Decision:
        """See ``Policy``."""
        reader = self._readers[name]
        entry = reader.job.data, index
        if entry in self._queue.uses:
            return Decision(entry)
        use = self._queue.soonest(reader.sharers, index, now)
        if use is None or num_bytes > self.capacity:
            return MISS
        evicted = ()
        if not self.fits(num_bytes):
            evicted = self._make_room(num_bytes, self._queue.time_of(use, now), now)
            if not evicted:
                return MISS
        self.add(entry, num_bytes, name)
        self._queue.push(entry, use)
        return Decision(entry, evicted)

    def drop(self, entry: Entry) -> None:
        """See ``Policy``."""
        self._queue.uses.pop(entry, None)
        super().drop(entry)

    def _regroup(self) -> None:
        readers = list(self._readers.values())
        paces = [reader.pace for reader in readers if reader.pace is not None]
        self._queue.pace = sum(paces) / len(paces) if paces else 1.0
        for reader in readers:
            reader.sharers = [other for other in readers if other.job.data == reader.job.data]

    def _predict(self, entry: Entry, reader: Reader, now: float) -> bool:
        """Queue an entry by its next use now, or drop it if there is none; return whether it stays."""
        use = self._queue.soonest(reader.sharers, entry[1], now)
        if use is None:
            self.drop(entry)
            return False
        self._queue.push(entry, use)
        return True

    def _requeue(self, reader: Reader, now: float) -> tuple[Entry, ...]:
        """Predict anew all entries that a job was to use next; return those without a next use."""
        entries = [entry for entry, use in self._queue.uses.items() if use.reader is reader]
        return tuple(entry for entry in entries if not self._predict(entry, reader, now))

    def _make_room(self, num_bytes: int, when: float, now: float) -> tuple[Entry, ...]:
        """Evict what is used later than ``when``; nothing if that is not enough."""
        victims: dict[Entry, Use] = {}
        lacking = self.num_bytes + num_bytes - self.capacity
        while lacking > 0:
            last = self._queue.last(self._readers.values(), now)
            if last is None or last[1] <= when:
                for entry, use in victims.items():
                    self._queue.push(entry, use)
                return ()
            victims[last[0]] = self._queue.uses.pop(last[0])
            lacking -= self.entries[last[0]][0]
        for entry in victims:
            super().drop(entry)
        return tuple(victims)
