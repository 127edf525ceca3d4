"""Policy of system D, step by step: a pool for all jobs, halves for this epoch and the next, gains.

Source: docs/sources.md, system D; the comments name its steps. Our reading of what is not legible there:

- the pool's first size (S31) is the sum of what the jobs hold, so all of the capacity; M_i is the job's
  ``share``, else an equal part of what the shares leave, in slots (S21) by the mean size of its samples;
- the gain (S13): k_i = max(1, T_last / T_i), rounded. The sentence ends in "(illegible) = 0"; ``last_gain=0``
  reads it as the gain of the slowest job, which then asks its neighbour only;
- E_i (S22): see ``cached_per_batch``;
- an empty pool with an own free slot (S35): as with a pool that is not empty, the slot is the job's own;
- a job that wants none (E_i = 0: it is compute bound) asks its neighbour for none either (S36 would let it).

Samples have sizes: a slot is the bytes of the sample that is asked for, and a request for it takes
min(pool, k_i slots) bytes. The pool is empty where it and what the job has free hold no slot; a slot that
moves between neighbours is what the asker lacks of it. What moves to a job stays free in its half until it
is used; what is idle when the halves change roles is the pool's again (S31: all idle cache is one pool).

A job in its warm-up epoch has no times yet, is not in the list and admits nothing (S11). Where jobs come,
go or are measured, the list is sorted and the gains and parts are computed anew."""

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import ceil

from .policy import MISS, NEVER, Decision, Entry, Job, JobProgress

# Targets.


def cached_per_batch(job: Job) -> int:
    """E_i of step S22: the fewest cached samples of a batch with which reading hides behind the rest.

    Reading takes T_io - h t_s where h samples are cached, and H of it is hidden: the least h with nothing
    left, clamp(ceil((T_io - H) / t_s), 0, B_i), as the formula, not legible in the source, follows from its
    text. A job without times may have a whole batch."""
    times, batch = job.times, job.batch_size
    if times is None:
        return batch
    visible = times.batch_io - times.hidden
    if visible <= 0:
        return 0
    # 1e-9: (0.3 - 0.2) / 0.1 is a little above 1, and means 1
    return batch if visible >= batch * times.sample_io else min(batch, ceil(visible / times.sample_io - 1e-9))


def gains(jobs: Iterable[Job], *, last_gain: int = 1) -> dict[str, int]:
    """k_i of step S13, by name of the jobs whose times are known, the shortest epoch first.

    A request for a slot is given so many; the slowest job takes ``last_gain`` where it has a neighbour."""
    epochs = sorted((job.times.epoch, job.name) for job in jobs if job.times is not None)
    found = {name: max(1, round(epochs[-1][0] / epoch)) if epoch > 0 else 1 for epoch, name in epochs}
    if len(found) > 1:
        found[epochs[-1][1]] = last_gain
    return found


# The policy.


class Space:
    """Space of a job in the cache."""

    def __init__(self, job: Job) -> None:
        self.job, self.progress = job, JobProgress(job)
        self.current: dict[int, int] = {}  # bytes of samples for this epoch, entered in the last one
        self.following: dict[int, int] = {}  # bytes of samples for the next epoch
        self.counts: dict[int, int] = {}  # samples that entered, by batch of the next order
        self.held = self.ahead = 0  # bytes of both, and of those for the next epoch
        self.idle = 0  # unused bytes of the half for the next epoch
        self.gain = self.desired = 0
        self._num_seen = self._bytes_seen = 0  # of samples that were offered

    def see(self, num_bytes: int) -> None:
        """Remember the size of a sample."""
        self._num_seen += 1
        self._bytes_seen += num_bytes

    def due(self, part: float) -> float:
        """s_i of step S21: samples of a batch that hit when a part of so many bytes is the job's alone."""
        slots = part * self._num_seen / self._bytes_seen if self._bytes_seen else float(self.job.num_samples)
        return min(slots / self.job.num_samples, 1.0) * self.job.batch_size

    def put(self, index: int, num_bytes: int, batch: int) -> None:
        """A sample enters the half for the next epoch; its batch counts one more."""
        self.idle -= num_bytes
        self.ahead += num_bytes
        self.held += num_bytes
        self.following[index] = num_bytes
        self.counts[batch] = self.counts.get(batch, 0) + 1

    def take(self, index: int) -> None:
        """A sample leaves the half for the next epoch; its bytes are idle, its batch counts one less."""
        num_bytes = self.following.pop(index)
        self.idle += num_bytes
        self.ahead -= num_bytes
        self.held -= num_bytes
        self.counts[self.progress.batch_of(self.progress.next_use(index))] -= 1

    def spend(self, index: int) -> int:
        """A sample of this epoch is taken; its bytes."""
        num_bytes = self.current.pop(index)
        self.held -= num_bytes
        return num_bytes

    def turn(self) -> tuple[tuple[int, ...], int]:
        """Let the halves change roles; return the samples that were not used, and the pool's bytes."""
        left, back = tuple(self.current), self.held - self.ahead + self.idle
        self.current, self.following, self.held, self.ahead, self.idle = self.following, {}, self.ahead, 0, 0
        self.counts = {}
        return left, back


class Gain:
    """See the module; ``last_gain``: the gain of the slowest job."""

    takes_shares = True

    def __init__(self, capacity: int, *, last_gain: int = 1) -> None:
        self.capacity, self.pool = capacity, capacity  # S31: all is idle
        self._last_gain, self._drawn = last_gain, random.Random(0)
        self.spaces: dict[str, Space] = {}
        self._list: list[Space] = []

    @property
    def held(self) -> Mapping[str, int]:
        return {name: space.held for name, space in self.spaces.items() if space.held}

    def join(self, job: Job, now: float) -> None:
        if job.name in self.spaces:
            self.spaces[job.name].job = job
            self.spaces[job.name].progress.update(job)
        else:
            self.spaces[job.name] = Space(job)
        self._sort()

    def leave(self, name: str, now: float) -> tuple[Entry, ...]:
        space = self.spaces.pop(name, None)
        if space is None:
            return ()
        self.pool += space.held + space.idle
        self._sort()
        return tuple((name, index) for index in (*space.current, *space.following))

    def _sort(self) -> None:
        found = gains((space.job for space in self.spaces.values()), last_gain=self._last_gain)  # S13
        self._list = [self.spaces[name] for name in found]
        for space in self._list:
            space.gain, space.desired = found[space.job.name], cached_per_batch(space.job)  # S13, S22

    def _part(self, job: Job) -> float:
        """M_i in bytes."""
        shares = [space.job.share for space in self.spaces.values()]
        given = [share for share in shares if share is not None]
        rest = max(0.0, 1 - sum(given)) / (len(shares) - len(given) or 1)
        return self.capacity * (rest if job.share is None else job.share)

    def begin(
        self, name: str, order: Sequence[int], following: Sequence[int] | None, now: float
    ) -> tuple[Entry, ...]:
        space = self.spaces[name]
        space.progress.begin(order, following, now)  # S32: two known orders
        left, back = space.turn()  # S38: the halves change roles; S32: counters are zeroed
        self.pool += back
        strange = [index for index in space.current if space.progress.next_use(index) == NEVER]
        for index in strange:  # foretold, but not in the order that came
            self.pool += space.spend(index)
        return tuple((name, index) for index in (*left, *strange))

    def use(self, name: str, index: int, now: float) -> Decision:
        space = self.spaces[name]
        space.progress.use(index, now)
        if index in space.following:  # used twice in an epoch
            return Decision((name, index))
        if index not in space.current:
            return MISS  # S33: a miss is loaded
        num_bytes = space.spend(index)
        self.pool += num_bytes  # S33: a hit's slot goes to the pool
        gone = self._enter(space, index, num_bytes)
        return Decision((name, index), ((name, index),) if gone is None else gone)

    def offer(self, name: str, index: int, num_bytes: int, now: float) -> Decision:
        space = self.spaces[name]
        if index in space.current or index in space.following:
            return Decision((name, index))
        space.see(num_bytes)
        gone = self._enter(space, index, num_bytes)
        return MISS if gone is None else Decision((name, index), gone)

    def drop(self, entry: Entry) -> None:
        space, index = self.spaces.get(entry[0]), entry[1]
        if space is not None and index in space.current:
            self.pool += space.spend(index)
        elif space is not None and index in space.following:
            space.take(index)

    def _enter(self, space: Space, index: int, num_bytes: int) -> tuple[Entry, ...] | None:
        """Enter a sample that was just used into the half for the next epoch (S34 to S37).

        Return evicted entries; None if it did not enter."""
        if space.job.times is None:  # S11: the warm-up epoch passes without cache
            return None
        place = space.progress.next_use(index)
        if place < space.progress.first + space.progress.length:  # S38: nothing is admitted in the last epoch
            return None
        batch = space.progress.batch_of(place)  # S34: the batch of the next order that it belongs to,
        count = space.counts.get(batch, 0)  # and how many of that entered
        lent, gone = min(self.pool, space.gain * num_bytes), list[Entry]()
        if space.idle + lent >= num_bytes:  # S35: there is a free slot, in the pool or its own
            if count >= space.desired:
                return None
            self.pool -= lent  # S35: takes min(pool, k_i) slots; a request that fails takes none
            space.idle += lent
        elif not space.desired or count >= space.due(self._part(space.job)):
            return None  # S36: the batch has what it is due by M_i
        else:  # S37: the job before this one in the list gives what is lacking, if it can
            at, lacking = self._list.index(space), num_bytes - space.idle
            giver = self._list[at - 1]
            if at == 0 or giver.idle + giver.ahead < lacking:
                return None
            while giver.idle < lacking:  # S37: a free slot if there is one, else a random sample's
                picked = next(islice(giver.following, self._drawn.randrange(len(giver.following)), None))
                giver.take(picked)
                gone.append((giver.job.name, picked))
            giver.idle -= lacking
            space.idle += lacking
        space.put(index, num_bytes, batch)
        return tuple(gone)
