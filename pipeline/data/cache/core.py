"""The sample cache without sockets, clock and bytes: runs ask, a policy decides, pages are reserved.

Whatever connections ask in whatever order, the policy hears of each sample of a run and epoch once, and the
entries are those that it keeps. It counts in whole pages, so what it admits has pages, but for those that
somebody still reads. The pages of a sample lie anywhere, so space never breaks into pieces.

```
   reserve -> being written -> whole -> free -> (leased: pages stay) -> lease ends -> pages free
                    |                    |
                    +-- free             +-- (not leased): pages free at once
```
Only whole entries are leased; a writer checks ``kept`` before it writes a sample."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....compression.errors import TransportError
from .policy import Entry, Job, Policy, Times
from .wire import NOWHERE, Hello, pages_of


@dataclass(slots=True, eq=False)
class Stored:
    """A sample in the shared memory."""

    entry: Entry
    num_bytes: int
    stamp: bytes  # given by its writer, for those who read it
    pages: array[int]
    whole: bool = False  # all of it has come, so that it can be read
    kept: bool = True  # False once the policy evicted it
    leases: int = 0  # connections that may be reading it


class Pages:
    """All entries, and ``num_pages`` pages of ``page_bytes``."""

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        self.num_pages, self.page_bytes = num_pages, page_bytes
        self.entries: dict[Entry, Stored] = {}
        self.given_up: set[Stored] = set()  # evicted, but somebody still reads them
        self.unused = array("I", range(num_pages - 1, -1, -1))

    def whole(self, entry: Entry | None) -> Stored | None:
        """Return an entry if all of it is there."""
        stored = self.entries.get(entry) if entry is not None else None
        return stored if stored is not None and stored.whole else None

    def reserve(self, entry: Entry, num_bytes: int, stamp: bytes) -> Stored | None:
        """Give an entry its pages, to be written; None if too few are free, as others are being read."""
        assert entry not in self.entries
        first = len(self.unused) - pages_of(num_bytes, self.page_bytes)
        if first < 0:
            return None
        pages = self.unused[first:]
        pages.reverse()  # pages side by side are read in one piece
        del self.unused[first:]
        stored = self.entries[entry] = Stored(entry, num_bytes, stamp, pages, not num_bytes)
        return stored

    def free(self, entry: Entry) -> None:
        """Give an entry up, if there is one. Its pages are free once nobody reads them."""
        stored = self.entries.pop(entry, None)
        if stored is None:
            return
        stored.kept = False
        if stored.leases:
            self.given_up.add(stored)
        else:
            self.unused.extend(reversed(stored.pages))

    def end_lease(self, stored: Stored) -> None:
        """End one lease of an entry."""
        stored.leases -= 1
        if not stored.leases and not stored.kept:
            self.given_up.remove(stored)
            self.unused.extend(reversed(stored.pages))


_LONGEST = 1e9  # seconds, some 30 years
_BYTES_OF_ORDERS = 18  # of a sample, in the orders of a run
_ORDERS_SHARE = 16  # the orders of all runs take this part of the memory at most
_LEAST_ORDER_BYTES = 1 << 20

_LOST_TURN_SECONDS = 60.0  # for which a run that asks for nothing keeps its turn
OUTSIDE, UNUSED, MISSED, DONE = range(4)
"""State of a sample in this epoch: not in its order; not used yet; used and missed; nothing more to ask."""


class NotWelcome(TransportError):
    """A run that cannot take part; the message is for a person."""


@dataclass(eq=False)
class Run:
    """One training run, whose connections are together one reader of each sample."""

    hello: Hello
    job: Job  # as the policy knows it
    members: set[Member] = field(default_factory=set)
    epoch: int = -1  # the newest that was begun
    states: bytearray = field(default_factory=bytearray)  # of each sample in that epoch
    num_ordered: int = 0
    used: int = 0  # samples in that epoch, by whichever connection
    began: float = 0.0
    pace: float = 0.0  # seconds of a sample, of the epoch before
    is_warm: bool = False  # its first epoch is over
    seen: float = 0.0  # when it last asked for its turn or for samples
    hits: int = 0
    uses: int = 0
    hit_bytes: int = 0

    def places(self, index: int) -> tuple[Entry, Entry]:
        """Entries that a sample of it may have: with its data, or with the run alone."""
        return (self.job.data, index), (self.job.name, index)

    def check(self, index: int) -> None:
        """Refuse the index of no sample."""
        if index >= self.hello.num_samples:
            raise TransportError(f"sample {index} of {self.hello.num_samples}")

    def begin(self, epoch: int, order: array[int], following: array[int] | None, now: float) -> None:
        """Begin an epoch; raises TransportError where an order has a sample that there is not, or twice."""
        states = self._states(order)
        if following is not None:
            self._states(following)
        self.is_warm = self.is_warm or self.epoch >= 0
        if self.used:
            self.pace = (now - self.began) / self.used
        self.epoch, self.states, self.num_ordered, self.used, self.began = epoch, states, len(order), 0, now

    def _states(self, order: array[int]) -> bytearray:
        states = bytearray(self.hello.num_samples)
        view, indices = np.frombuffer(states, np.uint8), np.frombuffer(order, np.uint32)
        if len(indices) and int(indices.max()) >= self.hello.num_samples:
            raise TransportError(f"an order has sample {indices.max()} of {self.hello.num_samples}")
        view[indices] = UNUSED
        if int(np.count_nonzero(view)) != len(order):
            raise TransportError("an order has a sample twice")
        return states

    def status(self, now: float, held: int) -> dict[str, Any]:
        """Return what a person sees of it; ``finish_seconds``: until its last epoch ends, as predicted."""
        hello, pace = self.hello, self.pace
        if self.used and (self.used * 4 > self.num_ordered or not pace):  # else too little is seen
            pace = (now - self.began) / self.used
        left = (hello.epochs - self.epoch) * self.num_ordered - self.used
        return {
            "job": hello.job,
            "run": hello.run,
            "data": hello.data,
            "epoch": self.epoch,
            "epochs": hello.epochs,
            "progress": self.used / self.num_ordered if self.num_ordered else 0.0,
            "connections": len(self.members),
            "uses": self.uses,
            "hits": self.hits,
            "hit_bytes": self.hit_bytes,
            "held_bytes": held,
            "finish_seconds": max(0.0, pace * left) if pace and self.epoch >= 0 else None,
        }


@dataclass(eq=False)
class Member:
    """One connection of a run: what it may be reading, and what it is about to write, in that order."""

    run: Run
    leased: list[Stored] = field(default_factory=list)
    writing: list[Stored] = field(default_factory=list)


class Core:
    """All that the broker decides; ``alone``: runs take turns for their first epoch, which is measured."""

    def __init__(self, policy: Policy, pages: Pages, *, alone: bool = False) -> None:
        self.policy, self.pages, self._alone = policy, pages, alone
        self.runs: dict[tuple[str, str], Run] = {}
        held = max(_LEAST_ORDER_BYTES, pages.num_pages * pages.page_bytes // _ORDERS_SHARE)
        self.most_samples = held // _BYTES_OF_ORDERS
        self.crowded = 0  # samples that were admitted, and had no pages as others were just being read

    def join(self, hello: Hello, now: float) -> Member:
        """Add a connection of a run; raises NotWelcome."""
        run = self.runs.get((hello.job, hello.run))
        if run is None:
            for other in self.runs.values():
                if other.hello.data == hello.data and other.hello.num_samples != hello.num_samples:
                    raise NotWelcome(
                        f"data {hello.data} has {other.hello.num_samples} samples for job {other.hello.job} "
                        f"and {hello.num_samples} for job {hello.job}; name different data differently"
                    )
            room = self.most_samples - sum(other.hello.num_samples for other in self.runs.values())
            if hello.num_samples > room:
                raise NotWelcome(
                    f"this cache keeps orders of {self.most_samples:,} samples, and job {hello.job} has "
                    f"{hello.num_samples:,}, with {room:,} left; serve a larger capacity="
                )
            if hello.share is not None and not self.policy.takes_shares:
                raise NotWelcome("cache.share= is for a cache with policy=gain, found another; leave it out")
            left = max(0.0, round(1 - sum(other.hello.share or 0.0 for other in self.runs.values()), 6))
            if (hello.share or 0.0) > left + 1e-9:
                found = f"found cache.share={hello.share:g} with {left:g} left"
                raise NotWelcome(f"the shares of all jobs sum to 1 at most, {found}")
            job = Job(  # the prefixes keep a run that is called like somebody's data apart from that
                name=f"run:{hello.run}:{hello.job}",
                data=f"data:{hello.data}",
                num_samples=hello.num_samples,
                batch_size=hello.batch_size,
                shared=hello.data != f"{hello.job} {hello.run}",  # its own name, see ``cache_reader``
                share=hello.share,
            )
            run = self.runs[hello.job, hello.run] = Run(hello, job)
            self.policy.join(job, now)
        elif hello != run.hello:
            raise NotWelcome(f"job {hello.job} has connections that differ; give each run a name of its own")
        member = Member(run)
        run.members.add(member)
        return member

    def leave(self, member: Member, now: float) -> None:
        """Remove a connection, however it ended; with its last one the run."""
        self.release(member)
        run = member.run
        run.members.remove(member)
        if not run.members:
            self._free(self.policy.leave(run.job.name, now))
            del self.runs[run.hello.job, run.hello.run]

    def measured(self, member: Member, times: Times, now: float) -> None:
        """Take the times of a run's warm-up epoch, which is over."""
        if not all(0 <= seconds <= _LONGEST for seconds in dataclasses.astuple(times)):
            raise TransportError(f"measured seconds are 0 to {_LONGEST:g}")
        member.run.job, member.run.is_warm = dataclasses.replace(member.run.job, times=times), True
        self.policy.join(member.run.job, now)

    def has_turn(self, member: Member, now: float) -> bool:
        """Return whether a run may begin its first epoch: nobody else is at it, or came before and waits."""
        member.run.seen = now
        cold = [run for run in self.runs.values() if not run.is_warm and now - run.seen < _LOST_TURN_SECONDS]
        cold.sort(key=lambda run: run.epoch < 0)  # who has begun comes first, then who joined first
        return not self._alone or member.run.is_warm or cold[0] is member.run

    def begin(
        self, member: Member, epoch: int, order: array[int], following: array[int] | None, now: float
    ) -> None:
        """Begin an epoch of a run. One that another connection has begun is left as it is."""
        self.release(member)
        if epoch > member.run.epoch:
            member.run.begin(epoch, order, following, now)
            self._free(self.policy.begin(member.run.job.name, order, following, now))

    def use(self, member: Member, epoch: int, indices: Sequence[int], now: float) -> list[Stored | None]:
        """Lease what there is of samples to this connection until its next message.

        ``epoch``: ``NOWHERE`` is that which the run began last."""
        self.release(member)
        run, found = member.run, []
        run.seen = now
        epoch = run.epoch if epoch == NOWHERE else epoch
        if len(set(indices)) != len(indices):
            raise TransportError("a sample is used twice at once")
        for index in indices:
            run.check(index)
            if run.states and epoch == run.epoch and run.states[index] == UNUSED:
                entry, evicted = self.policy.use(run.job.name, index, now)
                stored = self.pages.whole(entry)
                run.states[index] = MISSED if entry is None else DONE
                run.used += 1
                run.uses += 1
                run.hits += stored is not None
                run.hit_bytes += 0 if stored is None else stored.num_bytes
            else:
                stored, evicted = self._look(run, index), ()
            if stored is not None:
                assert stored.whole
                stored.leases += 1
                member.leased.append(stored)
            self._free(evicted)
            found.append(stored)
        return found

    def offer(
        self, member: Member, epoch: int, samples: Iterable[tuple[int, int, bytes]], now: float
    ) -> list[Stored | None]:
        """Return which loaded samples, (index, bytes, stamp) each, the run shall put, in order.

        The policy is asked of those that were used and missed in this epoch, and not offered since."""
        self.release(member)
        run, accepted = member.run, []
        epoch = run.epoch if epoch == NOWHERE else epoch
        for index, num_bytes, stamp in samples:
            run.check(index)
            if not run.states or epoch != run.epoch or run.states[index] != MISSED:
                accepted.append(None)
                continue
            run.states[index], stored = DONE, None
            takes = pages_of(num_bytes, self.pages.page_bytes) * self.pages.page_bytes
            entry, evicted = self.policy.offer(run.job.name, index, takes, now)
            self._free(evicted)
            if entry is not None and entry not in self.pages.entries:  # else of another run, or on its way
                stored = self.pages.reserve(entry, num_bytes, stamp)
                if stored is None:
                    self.crowded += 1
                    self.policy.drop(entry)
            accepted.append(stored)
        # One may have made room for another of them.
        accepted = [stored if stored is not None and stored.kept else None for stored in accepted]
        member.writing = [stored for stored in accepted if stored is not None and stored.num_bytes]
        return accepted

    def wrote(self, member: Member) -> None:
        """Make whole the first sample that a connection writes: all of it has come."""
        member.writing.pop(0).whole = True

    def drop(self, member: Member, index: int, stamp: bytes) -> None:
        """Evict a sample that is no longer what it was under ``stamp``; it may be offered anew."""
        self.release(member)
        run = member.run
        run.check(index)
        for entry in run.places(index):
            stored = self.pages.whole(entry)
            if stored is not None and stored.stamp == stamp:
                self._evict(entry)
        if run.states and run.states[index] == DONE and self._look(run, index) is None:
            run.states[index] = MISSED

    def release(self, member: Member) -> None:
        """End a connection's leases, and give up what it has not written to the end."""
        for stored in member.leased:
            self.pages.end_lease(stored)
        member.leased.clear()
        for stored in member.writing:
            if stored.kept:
                self._evict(stored.entry)
        member.writing.clear()

    def status(self, now: float) -> dict[str, Any]:
        """Return what a person sees: the cache, and a row for each run."""
        held, pages = self.policy.held, self.pages
        return {
            "capacity": self.policy.capacity,
            "free_bytes": len(pages.unused) * pages.page_bytes,
            "entries": len(pages.entries),
            "held_bytes": sum(held.values()),
            "crowded": self.crowded,
            "jobs": [run.status(now, held.get(run.job.name, 0)) for run in self.runs.values()],
        }

    def _look(self, run: Run, index: int) -> Stored | None:
        """Return the stored sample, whoever put it, without the policy's knowledge."""
        shared, own = run.places(index)
        return self.pages.whole(shared) or self.pages.whole(own)

    def _free(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.pages.free(entry)

    def _evict(self, entry: Entry) -> None:
        self.pages.free(entry)
        self.policy.drop(entry)
