"""Where a job is in the two orders that it said, and when it will be at a sample again.

A job says the order of this epoch and of the next (CN114968588A, step S32), so the next use of every sample
is known, as a position; its pace (S11: seconds of an epoch by its samples) makes a time of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from ....compression.errors import ConfigError
from .policy import Job

NEVER = -1
"""The position of a sample that a job will not use, as far as it said."""


class Course:
    """A job's way through its epochs. Positions count on from epoch to epoch.

    Attributes:
        first:  position of the first sample of this epoch. length: samples of this epoch.
        passed: samples used so far, in all epochs: the position where the job is.
        at:     when it used the last one.
        known:  whether it has said an order yet.
    """

    __slots__ = (
        *("_began", "_batch", "_batches", "_given", "_later", "_place", "_used", "at", "first", "job"),
        *("known", "length", "pace", "passed", "watch"),
    )

    def __init__(self, job: Job, *, watch: bool = True) -> None:
        """A job that comes. ``watch``: an epoch that it has gone through counts more than what it told."""
        self.watch = watch
        self.first = self.length = self.passed = self._batches = 0
        self.at = self._began = 0.0
        self.known, self._place, self._later, self._used = False, array("q"), None, bytearray()
        self.pace: float | None = None
        self.tell(job)

    def tell(self, job: Job) -> None:
        """The job is known better than before."""
        self.job, self._batch = job, max(1, job.batch_size)
        self._given = job.times is not None
        if job.times is not None:
            self.pace = job.times.epoch / max(1, job.num_samples)

    def begin(self, order: Sequence[int], following: Sequence[int] | None, now: float) -> bool:
        """Begin an epoch.

        Returns: whether all is as foretold: the last epoch was gone through, and this is its following.
        Raises:  ConfigError: an order names a sample that there is not, or one twice."""
        place = self._places(order)
        later = None if following is None else self._places(following)
        whole = self.known and self.passed == self.first + self.length
        foretold = whole and self._later is not None and place == self._later
        if whole and self.length and self.watch:
            self.pace, self._given = (now - self._began) / self.length, True
        self._batches += -(-self.length // self._batch)
        self.first += self.length
        self.passed, self.length, self.known = self.first, len(order), True
        self._place, self._later, self._used = place, later, bytearray(self.job.num_samples)
        self._began = self.at = now
        return foretold

    def _places(self, order: Sequence[int]) -> array[int]:
        num, name = self.job.num_samples, self.job.name
        asked = np.asarray(order, dtype=np.int64)
        if asked.size and not 0 <= asked.min() <= asked.max() < num:
            raise ConfigError(
                f"an order of the job {name} holds samples from 0 to {num - 1}, found {asked.min()} to "
                f"{asked.max()}; say how many samples it has when it joins"
            )
        places = np.full(num, NEVER, dtype=np.int64)
        places[asked] = np.arange(asked.size)
        if np.count_nonzero(places >= 0) < asked.size:
            raise ConfigError(f"an order of the job {name} uses each sample once, found some twice")
        return array("q", places.tobytes())

    def use(self, index: int, now: float) -> None:
        """The job uses a sample; once an epoch counts."""
        self.at = now
        if 0 <= index < len(self._used) and not self._used[index]:
            self._used[index] = 1
            self.passed += 1
            if not self._given and self.passed - self.first >= self._batch:
                self.pace = (now - self._began) / (self.passed - self.first)

    def next_use(self, index: int) -> int:
        """The position of the sample's next use, or NEVER."""
        if not 0 <= index < len(self._used):
            return NEVER
        if not self._used[index]:
            position = self._place[index]
            if position >= 0:
                return self.first + position
        if self._later is None:
            return NEVER
        position = self._later[index]
        return NEVER if position < 0 else self.first + self.length + position

    def batch_of(self, position: int) -> int:
        """The number, over all epochs, of the batch that a position of this epoch or the next is in."""
        beyond = position - self.first - self.length
        if beyond < 0:
            return self._batches + (position - self.first) // self._batch
        return self._batches - (-self.length // self._batch) + beyond // self._batch

    def when(self, position: int, now: float, otherwise: float) -> float:
        """When the job will be at a position; ``otherwise``: seconds for a sample where it has shown no pace.

        Counted from the last use, which is exact for who takes a batch at a time; who has not come for longer
        than a batch takes stands, and goes on from now."""
        pace, positions = self.pace, position - self.passed
        if pace is None:
            pace = otherwise
        since = now - self._batch * pace
        if since < self.at:
            since = self.at
        return since + positions * pace if positions > 0 else since
