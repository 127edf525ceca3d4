"""Which cached sample is used last: each is laid to the job that uses it next, at a position of its epochs.

Positions do not change while a job goes on, faster or slower than was thought, so the samples of a job keep
their order, and only the last of each job are compared by time. Where several jobs read a sample, another
may come to use it first; then it was laid too late, which shows when it is the last, and it is laid
anew."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from .job_progress import NEVER, Course
from .policy import Entry, Job

Item = tuple[int, int, int]
"""Minus a position, the index of the sample used there, and the number under which it was laid."""

SURPLUS, WANTED, DUE = range(3)
"""The ranks: a batch has more than its job needs; not more; not yet what it is due."""


class User(Course):
    """A job, and what lies in the cache because it is the next to use it.

    Attributes:
        heaps:   for each rank the samples as ``Item``, the farthest first; some of them outdated.
        counts:  how many samples of a batch are cached, by the batch's number.
        sharers: who reads the same data, this one among them.
        desired: so many samples of a batch it needs (E_i). due: so many are not taken from it (s_i).
    """

    __slots__ = ("counts", "desired", "due", "heaps", "sharers")

    def __init__(self, job: Job, *, watch: bool) -> None:
        super().__init__(job, watch=watch)
        self.heaps: tuple[list[Item], ...] = ([], [], [])
        self.counts: dict[int, int] = {}
        self.sharers: list[User] = []
        self.desired, self.due = job.batch_size, 0.0

    def rank(self, position: int) -> int:
        """The rank of one sample more for the batch that a position is in."""
        count = self.counts.get(self.batch_of(position), 0)
        return SURPLUS if count >= self.desired else DUE if count < self.due else WANTED


class Next(NamedTuple):
    """Who uses a sample next, at which position and when; nobody: None."""

    user: User | None
    position: int = NEVER
    when: float = 0.0


class _Place:
    __slots__ = ("batch", "number", "position", "rank", "user")

    def __init__(self, user: User, position: int, number: int) -> None:
        self.user, self.position, self.number = user, position, number
        self.batch, self.rank = user.batch_of(position), user.rank(position)


class Laid:
    """Entries by who uses them next. ``pace``: seconds for a sample of who has not shown any."""

    def __init__(self) -> None:
        self.pace = 1.0
        self._places: dict[Entry, _Place] = {}
        self._number = 0

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._places

    def user(self, entry: Entry) -> User:
        """Who uses an entry next, as far as is known without looking again."""
        return self._places[entry].user

    def of(self, user: User) -> list[Entry]:
        """The entries that are laid to a job."""
        return [entry for entry, place in self._places.items() if place.user is user]

    def soonest(self, sharers: Iterable[User], index: int, now: float) -> Next:
        """Who of those that read its data uses a sample next."""
        found, where, soonest, pace = None, NEVER, 0.0, self.pace
        for user in sharers:
            position = user.next_use(index)
            if position != NEVER:
                when = user.when(position, now, pace)
                if found is None or when < soonest:
                    found, where, soonest = user, position, when
        return Next(found, where, soonest)

    def lay(self, entry: Entry, user: User, position: int) -> None:
        """An entry is there, or used next by another than before."""
        self._number += 1
        place = self._places[entry] = _Place(user, position, self._number)
        user.counts[place.batch] = user.counts.get(place.batch, 0) + 1
        heap = user.heaps[place.rank]
        heappush(heap, (-position, entry[1], self._number))
        if len(heap) > 64 + 4 * len(self._places):  # most of it is outdated
            heap[:] = [item for item in heap if self._valid(user, item)]
            heapify(heap)

    def lift(self, entry: Entry) -> None:
        """An entry is no longer laid to anybody."""
        place = self._places.pop(entry)
        counts = place.user.counts
        counts[place.batch] -= 1
        if not counts[place.batch]:
            del counts[place.batch]

    def last(self, users: Iterable[User], rank: int, now: float) -> tuple[Entry, float] | None:
        """The entry of a rank that is used last, and when; None: there is none of the rank."""
        while True:
            found, latest = None, 0.0
            for user in users:
                heap = user.heaps[rank]
                while heap and not self._valid(user, heap[0]):
                    heappop(heap)
                if heap:
                    when = user.when(-heap[0][0], now, self.pace)
                    if found is None or when > latest:
                        found, latest = user, when
            if found is None:
                return None
            entry = (found.job.data, found.heaps[rank][0][1])
            if len(found.sharers) > 1:
                sooner = self.soonest(found.sharers, entry[1], now)
                if sooner.user is not None and sooner.user is not found:
                    self.lift(entry)
                    self.lay(entry, sooner.user, sooner.position)
                    continue
            return entry, latest

    def aside(self, entry: Entry) -> None:
        """Leave the entry that is the last of its job out of account, until it is put ``back`` or lifted."""
        place = self._places[entry]
        heappop(place.user.heaps[place.rank])

    def back(self, entry: Entry) -> None:
        """An entry that was put aside stays."""
        place = self._places[entry]
        heappush(place.user.heaps[place.rank], (-place.position, entry[1], place.number))

    def _valid(self, user: User, item: Item) -> bool:
        place = self._places.get((user.job.data, item[1]))
        return place is not None and place.number == item[2]
