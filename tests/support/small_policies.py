"""Policies of the sample cache in a few lines, to drive the broker: least recently used, and one of whims."""

from __future__ import annotations

import zlib
from collections import Counter, OrderedDict

from penstock.pipeline.samples.cache.policy import Admitted, Found, Job


class Lru:
    """Keeps what was used last; what a job had admitted leaves with it, unless another has the same data.

    ``entries``: bytes and the job that had it admitted, by entry."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.jobs: dict[str, Job] = {}
        self.entries: OrderedDict[tuple[str, int], tuple[int, str]] = OrderedDict()
        self.calls = []

    @property
    def held(self):
        held = Counter()
        for num_bytes, name in self.entries.values():
            held[name] += num_bytes
        return held

    def join(self, job, now):
        self.calls.append(("join", job))
        self.jobs[job.name] = job

    def leave(self, name, now):
        self.calls.append(("leave", name))
        data = self.jobs.pop(name).data
        if any(other.data == data for other in self.jobs.values()):
            return ()
        return self._evict([entry for entry in self.entries if entry[0] == data])

    def begin(self, name, order, following, now) -> tuple[tuple[str, int], ...]:
        self.calls.append(("begin", name, list(order), None if following is None else list(following)))
        return ()

    def use(self, name, index, now):
        self.calls.append(("use", name, index))
        entry = self.jobs[name].data, index
        if entry not in self.entries:
            return Found(None)
        self.entries.move_to_end(entry)
        return Found(entry)

    def offer(self, name, index, num_bytes, now):
        self.calls.append(("offer", name, index, num_bytes))
        entry = self.jobs[name].data, index
        if entry in self.entries:
            return Admitted(entry)
        if num_bytes > self.capacity:
            return Admitted(None)
        freed = []
        while sum(self.held.values()) + num_bytes > self.capacity:
            freed += self._evict([next(iter(self.entries))])
        self.entries[entry] = num_bytes, name
        return Admitted(entry, tuple(freed))

    def drop(self, entry):
        self.calls.append(("drop", entry))
        del self.entries[entry]

    def _evict(self, entries):
        for entry in entries:
            del self.entries[entry]
        return tuple(entries)


class Whims(Lru):
    """Gives up what was just used, or something else, and keeps samples of some jobs apart, as it likes."""

    def use(self, name, index, now):
        self.calls.append(("use", name, index))
        entry = next((one for one in self._places(name, index) if one in self.entries), None)
        if entry is not None and self._whim(3):
            return Found(entry, self._evict([entry]))
        if self.entries and self._whim(4):
            return Found(entry, self._evict([next(iter(self.entries))]))
        return Found(entry)

    def begin(self, name, order, following, now):
        super().begin(name, order, following, now)
        return self._evict(list(self.entries)[::2]) if self._whim(2) else ()

    def offer(self, name, index, num_bytes, now):
        self.calls.append(("offer", name, index, num_bytes))
        shared, own = self._places(name, index)
        entry = own if self._whim(2) else shared
        if entry in self.entries:
            return Admitted(entry)
        if num_bytes > self.capacity or self._whim(5):
            return Admitted(None)
        freed = []
        while sum(self.held.values()) + num_bytes > self.capacity:
            freed += self._evict([next(iter(self.entries))])
        self.entries[entry] = num_bytes, name
        return Admitted(entry, tuple(freed))

    def leave(self, name, now):
        del self.jobs[name]
        return self._evict([entry for entry, (_, owner) in self.entries.items() if owner == name])

    def _places(self, name, index):
        return (self.jobs[name].data, index), (name, index)

    def _whim(self, of):
        return zlib.crc32(str(len(self.calls)).encode()) % of == 0


class Watched:
    """Another policy, and what it must have by what it answered.

    ``entries``: what it keeps, with its bytes; ``calls``, ``jobs``: what it was told."""

    def __init__(self, policy):
        self.policy, self.capacity = policy, policy.capacity
        self.calls, self.jobs, self.entries = [], {}, {}

    @property
    def held(self):
        assert sum(self.policy.held.values()) == sum(self.entries.values())
        return self.policy.held

    def join(self, job, now):
        self.calls.append(("join", job))
        self.jobs[job.name] = job
        self.policy.join(job, now)

    def leave(self, name, now):
        self.calls.append(("leave", name))
        del self.jobs[name]
        return self._gone(self.policy.leave(name, now))

    def begin(self, name, order, following, now):
        self.calls.append(("begin", name))
        return self._gone(self.policy.begin(name, order, following, now))

    def use(self, name, index, now):
        self.calls.append(("use", name, index))
        found = self.policy.use(name, index, now)
        if found.entry is None:
            assert found.freed == ()
            assert (name, index) not in self.entries
        else:
            assert found.entry in self.entries
            assert found.entry in self._places(name, index)
        self._gone(found.freed)
        return found

    def offer(self, name, index, num_bytes, now):
        self.calls.append(("offer", name, index, num_bytes))
        admitted = self.policy.offer(name, index, num_bytes, now)
        assert admitted.entry not in admitted.freed
        self._gone(admitted.freed)
        if admitted.entry is None:
            assert admitted.freed == ()  # nobody leaves for nothing
        else:
            assert admitted.entry in self._places(name, index)
            self.entries.setdefault(admitted.entry, num_bytes)
        return admitted

    def drop(self, entry):
        self.calls.append(("drop", entry))
        del self.entries[entry]
        self.policy.drop(entry)

    def _places(self, name, index):
        return (self.jobs[name].data, index), (name, index)

    def _gone(self, entries):
        for entry in entries:
            del self.entries[entry]
        return entries
