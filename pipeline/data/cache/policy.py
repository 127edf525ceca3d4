"""Interface of the eviction policies, and the progress of a job, by which two of them predict (system D).

A policy is pure: its caller passes the time. A sample is used first; one that is missed is then offered."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

Entry = tuple[str, int]
"""Key of a cached sample: the data set or the job that it belongs to, and its index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Measurements of a job's warm-up epoch, in seconds."""

    epoch: float  # T_i
    batch_io: float  # T_io, of reading a batch
    sample_io: float  # t_s, of reading one sample
    augmentation: float  # of a batch, once it was read
    training: float  # of a batch
    hidden: float  # H_i, the part of reading a batch that passes during other work


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training run: its ranks and loading workers together read each sample once an epoch."""

    name: str
    data: str  # name of its samples; other jobs may read the same if it is ``shared``
    num_samples: int
    batch_size: int
    times: Times | None = None  # until the warm-up epoch is over
    shared: bool = True
    share: float | None = None  # M_i, its part of the cache; None: what others leave, in equal parts


class Decision(NamedTuple):
    """Entry under which a sample is cached, None if it is not; and the entries that are evicted."""

    entry: Entry | None
    evicted: tuple[Entry, ...] = ()


MISS = Decision(None)


class Policy(Protocol):
    """Choice of the samples that stay in ``capacity`` bytes; the caller keeps the bytes themselves."""

    capacity: int
    takes_shares: bool  # whether the share of a job counts

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes by the job that they are kept for, also an expected one; jobs without any are not named."""
        ...

    def join(self, job: Job, now: float) -> None:
        """Add a job, or replace what is known of it: its times were measured."""

    def leave(self, name: str, now: float) -> tuple[Entry, ...]:
        """Remove a job, if there is one of the name; return evicted entries, other jobs' too."""
        ...

    def begin(
        self, name: str, order: Sequence[int], following: Sequence[int] | None, now: float
    ) -> tuple[Entry, ...]:
        """Begin an epoch of a job; return evicted entries. ``following``: None if this is the last."""
        ...

    def use(self, name: str, index: int, now: float) -> Decision:
        """Count a use of a sample, once an epoch, in about the announced order."""
        ...

    def offer(self, name: str, index: int, num_bytes: int, now: float) -> Decision:
        """Offer a sample that was loaded because ``use`` missed it; a cached one keeps its entry."""
        ...

    def drop(self, entry: Entry) -> None:
        """Forget an entry: its sample changed, or its bytes could not be kept."""


NEVER = -1
"""Position of a sample that the job will not use, as far as it announced."""


class JobProgress:
    """A job on its way through its epochs. Positions count on from epoch to epoch.

    Attributes:
        first, length: Position of the first sample of this epoch, and number of its samples.
        passed: Number of samples used so far in all epochs, which is the job's position.
        pace: Seconds of a sample: of the last whole epoch, else of the measured warm-up epoch, else of the
            uses so far; None: less than a batch was used."""

    def __init__(self, job: Job) -> None:
        self.first = self.length = self.passed = self._batches = 0
        self._last_use = self._begin = 0.0
        self._place = array("q", [NEVER]) * job.num_samples
        self._later: array[int] | None = None
        self._used = bytearray(job.num_samples)
        self.pace: float | None = None
        self.update(job)

    def update(self, job: Job) -> None:
        """Replace what is known of the job."""
        self.job, self._batch = job, job.batch_size
        self._measured = job.times is not None
        if job.times is not None:
            self.pace = job.times.epoch / job.num_samples

    def begin(self, order: Sequence[int], following: Sequence[int] | None, now: float) -> bool:
        """Begin an epoch; return whether the last one was gone through, and announced this one."""
        place = self._places(order)
        whole = self.length > 0 and self.passed == self.first + self.length
        if whole:
            self.pace, self._measured = (now - self._begin) / self.length, True
        as_announced = whole and place == self._later
        self._batches += -(-self.length // self._batch)
        self.first += self.length
        self.passed, self.length = self.first, len(order)
        self._place, self._later = place, None if following is None else self._places(following)
        self._used = bytearray(self.job.num_samples)
        self._begin = self._last_use = now
        return as_announced

    def _places(self, order: Sequence[int]) -> array[int]:
        places = np.full(self.job.num_samples, NEVER, dtype=np.int64)
        places[np.asarray(order, dtype=np.int64)] = np.arange(len(order))
        return array("q", places.tobytes())

    def use(self, index: int, now: float) -> None:
        """Count a use of a sample, once an epoch."""
        self._last_use = now
        if not self._used[index]:
            self._used[index] = 1
            self.passed += 1
            if not self._measured and self.passed - self.first >= self._batch:
                self.pace = (now - self._begin) / (self.passed - self.first)

    def next_use(self, index: int) -> int:
        """Position of the next use of a sample, or NEVER."""
        position = self._place[index]
        if position >= 0 and not self._used[index]:
            return self.first + position
        position = NEVER if self._later is None else self._later[index]
        return NEVER if position < 0 else self.first + self.length + position

    def batch_of(self, position: int) -> int:
        """Number, over all epochs, of the batch that a position of this epoch or the next is in."""
        beyond = position - self.first - self.length
        if beyond < 0:
            return self._batches + (position - self.first) // self._batch
        return self._batches - (-self.length // self._batch) + beyond // self._batch

    def time_of(self, position: int, now: float, default_pace: float) -> float:
        """Predicted time of a position; ``default_pace`` is for a job without a pace."""
        pace = default_pace if self.pace is None else self.pace
        # It counts from the last use, which is exact for a reader of whole batches; a job that has not come
        # for longer than a batch takes is standing, and goes on from now.
        since = max(self._last_use, now - self._batch * pace)
        return since + max(0, position - self.passed) * pace
