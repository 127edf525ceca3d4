"""What the broker knows of a training run, whose connections are one reader of each sample.

Ranks and loading workers of a run connect one by one; the first that uses a sample in an epoch counts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....compression.errors import TransportError
from .ledger import Stored
from .messages import Hello
from .policy import Entry, Job, Times

OUTSIDE, UNUSED, MISSED, DONE = range(4)
"""Of a sample in this epoch: not in its order; not used yet; used and not found; nothing more to ask."""

# So that a run that is called as somebody's data has no entry in common with it.
_OF_A_RUN, _OF_DATA = "run:", "data:"


@dataclass(eq=False)
class Run:
    """One training run.

    Attributes:
        members: its connections.
        epoch:   the newest that was begun; -1: none was.
        seen:    how far each sample is in that epoch.
        used:    samples that were used in it, by whichever connection.
        began:   when it began.
        pace:    seconds a sample, of the epoch before.
    """

    hello: Hello
    members: set[Member] = field(default_factory=set)
    times: Times | None = None
    epoch: int = -1
    seen: bytearray = field(default_factory=bytearray)
    num_ordered: int = 0
    used: int = 0
    began: float = 0.0
    pace: float = 0.0
    hits: int = 0
    uses: int = 0
    hit_bytes: int = 0

    @property
    def key(self) -> tuple[str, str]:
        """What tells runs apart: two may have one name."""
        return self.hello.job, self.hello.run

    @property
    def name(self) -> str:
        """The name that a policy knows it by."""
        return f"{_OF_A_RUN}{self.hello.run}:{self.hello.job}"

    @property
    def job(self) -> Job:
        """What a policy is told of it."""
        told = self.hello
        return Job(
            name=self.name,
            data=f"{_OF_DATA}{told.data}",
            num_samples=told.num_samples,
            batch_size=told.batch_size,
            times=self.times,
        )

    def places(self, index: int) -> tuple[Entry, Entry]:
        """Where a sample of it may lie: with its data, or with the run alone."""
        return (f"{_OF_DATA}{self.hello.data}", index), (self.name, index)

    def check(self, index: int) -> None:
        """Refuse the index of no sample."""
        if index >= self.hello.num_samples:
            raise TransportError(f"sample {index} of {self.hello.num_samples}")

    def begin(self, epoch: int, order: array[int], following: array[int] | None, now: float) -> None:
        """Begin an epoch.

        Raises: TransportError: an order has a sample that there is not, or one twice."""
        seen = self._marked(order)
        if following is not None:
            self._marked(following)
        if self.used:
            self.pace = (now - self.began) / self.used
        self.epoch, self.seen, self.num_ordered, self.used, self.began = epoch, seen, len(order), 0, now

    def _marked(self, order: array[int]) -> bytearray:
        marks = bytearray(self.hello.num_samples)
        view, places = np.frombuffer(marks, np.uint8), np.frombuffer(order, np.uint32)
        if len(places) and int(places.max()) >= self.hello.num_samples:
            raise TransportError(f"an order has sample {places.max()} of {self.hello.num_samples}")
        view[places] = UNUSED
        if int(np.count_nonzero(view)) != len(order):
            raise TransportError("an order has a sample twice")
        return marks

    def count(self, stored: Stored | None) -> None:
        """Note a first use."""
        self.used += 1
        self.uses += 1
        if stored is not None:
            self.hits += 1
            self.hit_bytes += stored.num_bytes

    def status(self, now: float, held: int) -> dict[str, Any]:
        """What a person sees of it; ``finish_seconds``: until its last epoch ends, as predicted."""
        told = self.hello
        done = self.used / self.num_ordered if self.num_ordered else 0.0
        pace = self.pace
        if self.used and (self.used * 4 > self.num_ordered or not pace):  # else too little is seen
            pace = (now - self.began) / self.used
        left = (told.epochs - self.epoch - 1) * self.num_ordered + self.num_ordered - self.used
        return {
            "job": told.job,
            "run": told.run,
            "data": told.data,
            "epoch": self.epoch,
            "epochs": told.epochs,
            "progress": done,
            "connections": len(self.members),
            "readers": told.readers,
            "uses": self.uses,
            "hits": self.hits,
            "hit_bytes": self.hit_bytes,
            "held_bytes": held,
            "measured": self.times is not None,
            "finish_seconds": max(0.0, pace * left) if pace and self.epoch >= 0 else None,
        }


@dataclass(eq=False)
class Member:
    """One connection of a run: what it may be reading, and what it is about to write, in that order."""

    run: Run
    leased: list[Stored] = field(default_factory=list)
    writing: list[Stored] = field(default_factory=list)
