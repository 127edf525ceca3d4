"""The sample cache without sockets, clock and bytes: runs ask, a policy decides, the ledger holds the pages.

Whatever connections ask in whatever order, the policy is told of each sample of a run and epoch once, and
what it keeps is what the ledger has. It is told of whole pages, so what it admits has pages, but for those
that somebody still reads."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from ....compression.errors import TransportError
from .ledger import Ledger, Stored
from .messages import NOWHERE, Hello
from .pages import Pages
from .policy import Entry, Policy, Times
from .runs import DONE, MISSED, UNUSED, Member, Run

_LONGEST = 1e9  # seconds, some 30 years
_BYTES_OF_ORDERS = 18  # of a sample, in the orders of a run
_BOOKS_OF_ALL = 16  # the orders of all runs take this part of the slab at most
_LEAST_BOOK_BYTES = 1 << 20


class NotWelcome(TransportError):
    """A run that cannot take part, in words for a person."""


class Core:
    """All that the broker decides. ``now``: seconds of any clock that does not go back."""

    def __init__(self, policy: Policy, pages: Pages) -> None:
        self.policy, self.ledger = policy, Ledger(pages)
        self.runs: dict[tuple[str, str], Run] = {}
        held = max(_LEAST_BOOK_BYTES, pages.num_pages * pages.page_bytes // _BOOKS_OF_ALL)
        self.most_samples = held // _BYTES_OF_ORDERS
        self.crowded = 0  # samples that were admitted, and had no pages as others were just being read

    def join(self, hello: Hello, now: float) -> Member:
        """A connection says whose it is.

        Raises: NotWelcome: its run is known otherwise, its data has another number of samples, or so many
        that the orders of all runs would take more memory than such a cache is worth."""
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
            run = Run(hello)
            self.runs[run.key] = run
            self.policy.join(run.job, now)
        elif dataclasses.replace(hello, readers=run.hello.readers) != run.hello:
            raise NotWelcome(f"job {hello.job} has connections that differ; give each run a name of its own")
        member = Member(run)
        run.members.add(member)
        return member

    def leave(self, member: Member, now: float) -> None:
        """A connection is gone, however it ended; with its last one the run is."""
        self.release(member)
        run = member.run
        run.members.remove(member)
        if not run.members:
            self._free(self.policy.leave(run.name, now))
            del self.runs[run.key]

    def measured(self, member: Member, times: Times, now: float) -> None:
        """The warm-up epoch of a run is over."""
        if not all(0 <= seconds <= _LONGEST for seconds in dataclasses.astuple(times)):
            raise TransportError(f"measured seconds are 0 to {_LONGEST:g}")
        member.run.times = times
        self.policy.join(member.run.job, now)

    def wants(self, member: Member, epoch: int) -> bool:
        """Whether the orders of an epoch are news; they are said by one connection of a run."""
        self.release(member)
        return epoch > member.run.epoch

    def begin(
        self, member: Member, epoch: int, order: array[int], following: array[int] | None, now: float
    ) -> None:
        """An epoch of a run begins. One that was begun before is left as it is."""
        if self.wants(member, epoch):
            member.run.begin(epoch, order, following, now)
            self._free(self.policy.begin(member.run.name, order, following, now))

    def use(self, member: Member, epoch: int, indices: Sequence[int], now: float) -> list[Stored | None]:
        """A run uses samples, in an epoch or (``NOWHERE``) in that which it began last.

        What is there is leased to this connection until it says anything else."""
        self.release(member)
        run, found = member.run, []
        epoch = run.epoch if epoch == NOWHERE else epoch
        if len(set(indices)) != len(indices):
            raise TransportError("a sample is used twice at once")
        for index in indices:
            run.check(index)
            if run.seen and epoch == run.epoch and run.seen[index] == UNUSED:
                entry, freed = self.policy.use(run.name, index, now)
                stored = self.ledger.whole(entry)
                run.seen[index] = MISSED if entry is None else DONE
                run.count(stored)
            else:
                stored, freed = self._look(run, index), ()
            if stored is not None:
                self.ledger.lease(stored)
                member.leased.append(stored)
            self._free(freed)
            found.append(stored)
        return found

    def offer(
        self,
        member: Member,
        epoch: int,
        samples: Iterable[tuple[int, int, bytes]],
        now: float,
    ) -> list[Stored | None]:
        """A run has loaded samples: (index, bytes, stamp) each. What is returned it shall put, in order.

        The policy is asked of those that were used and missed in this epoch, and not offered since."""
        self.release(member)
        run, asked = member.run, []
        epoch = run.epoch if epoch == NOWHERE else epoch
        for index, num_bytes, stamp in samples:
            run.check(index)
            if not run.seen or epoch != run.epoch or run.seen[index] != MISSED:
                asked.append(None)
                continue
            run.seen[index] = DONE
            stored = self._admit(run, index, num_bytes, stamp, now)
            asked.append(stored)
            if stored is not None:
                member.writing.append(stored)
        # One may have made room for another of them.
        member.writing = [stored for stored in member.writing if stored.kept]
        return [stored if stored is not None and stored.kept else None for stored in asked]

    def wrote(self, member: Member, num_bytes: int) -> None:
        """The next ``num_bytes`` of the first sample that a connection writes have come."""
        stored = member.writing[0]
        stored.written += num_bytes
        if stored.written == stored.num_bytes:
            del member.writing[0]
            if stored.kept:
                self.ledger.finish(stored)

    def drop(self, member: Member, index: int, stamp: bytes) -> None:
        """A sample is no longer what it was under ``stamp``; one that was found may be offered anew."""
        self.release(member)
        run = member.run
        run.check(index)
        for entry in run.places(index):
            stored = self.ledger.whole(entry)
            if stored is not None and stored.stamp == stamp:
                self._lose(entry)
        if run.seen and run.seen[index] == DONE and self._look(run, index) is None:
            run.seen[index] = MISSED

    def release(self, member: Member) -> None:
        """A connection reads nothing, and will not write what is not all there."""
        for stored in member.leased:
            self.ledger.end(stored)
        member.leased.clear()
        for stored in member.writing:
            if stored.kept:
                self._lose(stored.entry)
        member.writing.clear()

    def status(self, now: float) -> dict[str, Any]:
        """What a person sees: the cache, and a row for each run."""
        held, pages = self.policy.held, self.ledger.pages
        return {
            "capacity": self.policy.capacity,
            "free_bytes": pages.num_free * pages.page_bytes,
            "entries": len(self.ledger.entries),
            "entry_bytes": self.ledger.num_bytes,
            "held_bytes": sum(held.values()),
            "crowded": self.crowded,
            "jobs": [run.status(now, held.get(run.name, 0)) for run in self.runs.values()],
        }

    def _look(self, run: Run, index: int) -> Stored | None:
        """What is there of a sample, whoever put it; the policy is not told."""
        shared, own = run.places(index)
        return self.ledger.whole(shared) or self.ledger.whole(own)

    def _admit(self, run: Run, index: int, num_bytes: int, stamp: bytes, now: float) -> Stored | None:
        pages = self.ledger.pages
        takes = pages.needed(num_bytes) * pages.page_bytes
        if takes > self.policy.capacity:
            return None
        entry, freed = self.policy.offer(run.name, index, takes, now)
        self._free(freed)
        if entry is None or entry in self.ledger.entries:  # of another run, or on its way
            return None
        stored = self.ledger.reserve(entry, num_bytes, stamp)
        if stored is None:
            self.crowded += 1
            self.policy.drop(entry)
        return stored

    def _free(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self.ledger.free(entry)

    def _lose(self, entry: Entry) -> None:
        """Give up what the policy would have kept."""
        self.ledger.free(entry)
        self.policy.drop(entry)
