"""The default policy: the samples that will be used soonest stay, by the predicted time of their next use.

It has the inputs of ``gain`` (two known orders; seconds of an epoch) and Belady's rule (A study of
replacement algorithms, 1966): the sample that is used last is evicted, one that is used later not admitted.
The next use is predicted as now + positions until then x T_i / N_i, the soonest among the data's jobs.

There is a heap for each job, keyed by position. Positions do not change while a job goes on, at whatever
pace, so only the last sample of each job is compared by time. Where several jobs read a sample, another may
come to use it first; that is checked when the sample is the last.

What no job will use is kept for a job that may come, after all that a job will use, until ``keep`` seconds
after the last job that reads the data has left. Time is looked at when an epoch begins or a job leaves."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from .policy import MISS, NEVER, Decision, Entry, Job, JobProgress


class Reader(JobProgress):
    """A job and the cached samples that it is the next to use."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.heap: list[tuple[int, int]] = []  # (minus position, sample), last used first; some outdated
        self.sharers: list[Reader] = []  # all readers of the same data, this one among them

    def next_use(self, index: int) -> int:
        # What is kept may be of a job that had more samples.
        return super().next_use(index) if index < self.job.num_samples else NEVER


class Expected(Reader):
    """A job that may come, which uses each cached sample of some data after all other uses."""

    def __init__(self, data: str) -> None:
        super().__init__(Job(name=f"expected {data}", data=data, num_samples=0, batch_size=1))
        self.until = math.inf  # the time at which it is expected no more; inf: a job reads the data

    def next_use(self, index: int) -> int:
        return index

    def time_of(self, position: int, now: float, default_pace: float) -> float:
        return math.inf


class Use(NamedTuple):
    """Predicted next use of a sample, which has so many bytes."""

    reader: Reader
    position: int
    num_bytes: int


class NextUse:
    """See the module; ``uses`` has the entries that are cached."""

    takes_shares = False

    def __init__(self, capacity: int, *, keep: float = 0.0) -> None:
        self.capacity, self.num_bytes, self._keep = capacity, 0, keep
        self.uses: dict[Entry, Use] = {}
        self._readers: dict[str, Reader] = {}
        self._expected: dict[str, Expected] = {}  # by data
        self._pace = 1.0  # seconds of a sample, for jobs without a pace

    @property
    def held(self) -> Mapping[str, int]:
        """See ``Policy``: bytes by the job that is to use them next, or is expected."""
        held = Counter[str]()
        for use in self.uses.values():
            held[use.reader.job.name] += use.num_bytes
        return +held

    def join(self, job: Job, now: float) -> None:
        if job.name in self._readers:
            self._readers[job.name].update(job)
        else:
            self._readers[job.name] = Reader(job)
            expected = self._expected.get(job.data)
            if expected is not None and now <= expected.until:
                expected.until = math.inf
        self._regroup()

    def leave(self, name: str, now: float) -> tuple[Entry, ...]:
        """See ``Policy``: what others use, or may use, stays for them."""
        gone = self._expire(now)
        if name not in self._readers:
            return gone
        reader = self._readers[name]
        expected = self._expected.get(reader.job.data)
        if expected is not None and len(reader.sharers) == 2:  # nobody else reads the data
            expected.until = now + self._keep
        return gone + self._remove(reader, now)

    def _remove(self, reader: Reader, now: float) -> tuple[Entry, ...]:
        """Remove a reader; return the entries that nobody else will use."""
        del self._readers[reader.job.name]
        self._regroup()
        reader.sharers.remove(reader)
        return self._predict_all(reader, now)

    def _expire(self, now: float) -> tuple[Entry, ...]:
        """Evict what was kept for jobs that did not come."""
        gone: tuple[Entry, ...] = ()
        for data, expected in list(self._expected.items()):
            if expected.until < now:
                del self._expected[data]
                gone += self._remove(expected, now)
        return gone

    def begin(
        self, name: str, order: Sequence[int], following: Sequence[int] | None, now: float
    ) -> tuple[Entry, ...]:
        """See ``Policy``: cached samples keep their positions, unless the epoch is not the announced one."""
        reader, evicted = self._readers[name], self._expire(now)
        data = reader.job.data
        if self._keep and reader.job.shared and data not in self._expected:
            expected = self._expected[data] = Expected(data)
            self._readers[expected.job.name] = expected
            self._regroup()
        if not reader.begin(order, following, now):
            evicted += self._predict_all(reader, now)
        self._regroup()
        return evicted

    def use(self, name: str, index: int, now: float) -> Decision:
        reader = self._readers[name]
        reader.use(index, now)
        entry = reader.job.data, index
        use = self.uses.get(entry)
        if use is None:
            return MISS
        # If another job uses it next, it does so as before.
        stays = use.reader is not reader or self._predict(entry, reader, now)
        return Decision(entry, () if stays else (entry,))

    def offer(self, name: str, index: int, num_bytes: int, now: float) -> Decision:
        reader = self._readers[name]
        entry = reader.job.data, index
        if entry in self.uses:
            return Decision(entry)
        use = self._soonest(reader, index, num_bytes, now)
        if use is None or num_bytes > self.capacity:
            return MISS
        evicted = self._make_room(num_bytes, self._time_of(use, now), now)
        if evicted is None:
            return MISS
        self.num_bytes += num_bytes
        self._push(entry, use)
        return Decision(entry, evicted)

    def drop(self, entry: Entry) -> None:
        if (use := self.uses.pop(entry, None)) is not None:
            self.num_bytes -= use.num_bytes

    def _regroup(self) -> None:
        readers = list(self._readers.values())
        paces = [reader.pace for reader in readers if reader.pace is not None]
        self._pace = sum(paces) / len(paces) if paces else 1.0
        for reader in readers:
            reader.sharers = [other for other in readers if other.job.data == reader.job.data]

    def _time_of(self, use: Use, now: float) -> float:
        return use.reader.time_of(use.position, now, self._pace)

    def _soonest(self, reader: Reader, index: int, num_bytes: int, now: float) -> Use | None:
        """Return the soonest next use of a sample by one of those that share it with a reader."""
        uses = [Use(one, one.next_use(index), num_bytes) for one in reader.sharers]
        uses = [use for use in uses if use.position != NEVER]
        return min(uses, key=lambda use: self._time_of(use, now), default=None)

    def _push(self, entry: Entry, use: Use) -> None:
        self.uses[entry] = use
        heap = use.reader.heap
        heappush(heap, (-use.position, entry[1]))
        if len(heap) > 64 + 4 * len(self.uses):  # most of it is outdated
            heap[:] = {item for item in heap if self._is_valid(use.reader, item)}
            heapify(heap)

    def _is_valid(self, reader: Reader, item: tuple[int, int]) -> bool:
        use = self.uses.get((reader.job.data, item[1]))
        return use is not None and use.reader is reader and use.position == -item[0]

    def _predict(self, entry: Entry, reader: Reader, now: float) -> bool:
        """Queue an entry by its next use now, or drop it if there is none; return whether it stays."""
        use = self._soonest(reader, entry[1], self.uses[entry].num_bytes, now)
        if use is None:
            self.drop(entry)
            return False
        self._push(entry, use)
        return True

    def _predict_all(self, reader: Reader, now: float) -> tuple[Entry, ...]:
        """Predict anew all entries that a job was to use next; return those without a next use."""
        entries = [entry for entry, use in self.uses.items() if use.reader is reader]
        return tuple(entry for entry in entries if not self._predict(entry, reader, now))

    def _last(self, now: float) -> Entry | None:
        """Return the entry that is used last."""
        while True:
            for reader in self._readers.values():
                while reader.heap and not self._is_valid(reader, reader.heap[0]):
                    heappop(reader.heap)
            entries = [(one.job.data, one.heap[0][1]) for one in self._readers.values() if one.heap]
            entry = max(entries, key=lambda entry: self._time_of(self.uses[entry], now), default=None)
            if entry is None:
                return None
            use = self.uses[entry]
            sooner = self._soonest(use.reader, entry[1], use.num_bytes, now)
            if sooner is None or sooner.reader is use.reader:
                return entry
            self._push(entry, sooner)

    def _make_room(self, num_bytes: int, when: float, now: float) -> tuple[Entry, ...] | None:
        """Evict what is used later than ``when``; return None, and evict nothing, if that is not enough."""
        victims: dict[Entry, Use] = {}
        while self.num_bytes + num_bytes > self.capacity:
            entry = self._last(now)
            if entry is None or self._time_of(self.uses[entry], now) <= when:
                for victim, use in victims.items():
                    self.num_bytes += use.num_bytes
                    self._push(victim, use)
                return None
            victims[entry] = self.uses[entry]
            self.drop(entry)
        return tuple(victims)
