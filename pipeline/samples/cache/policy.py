"""What a policy of the sample cache is told, and what it answers.

A policy is pure: no clock, no file, no thread. The broker and the simulator drive the same objects and say
what time it is. A sample is first used; where that finds nothing it is loaded, and then offered.

Source: CN114968588A, steps S11 (what is measured of a job), S32 (two known orders) and S33-S38."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

Entry = tuple[str, int]
"""Where a sample lies: the data set or the job that it belongs to, and its index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What a warm-up epoch of a job measures, in seconds.

    Attributes:
        epoch:        T_i, of a whole epoch.
        batch_io:     T_io, of reading a batch.
        sample_io:    t_s, of reading one sample.
        augmentation: of a batch, once it was read.
        training:     of a batch.
        hidden:       H_i, of a batch's reading, what passes behind the rest; 0 where nobody loads ahead.
    """

    epoch: float
    batch_io: float
    sample_io: float
    augmentation: float
    training: float
    hidden: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training run: its ranks and loading workers read each sample once an epoch, together.

    Attributes:
        data:  jobs that name the same data read the same samples under the same indices.
        times: none before the warm-up epoch is over.
    """

    name: str
    data: str
    num_samples: int
    batch_size: int
    times: Times | None = None


class Found(NamedTuple):
    """Where a sample lies, None if nowhere; and what is no longer kept because of its use."""

    entry: Entry | None
    freed: tuple[Entry, ...] = ()


class Admitted(NamedTuple):
    """Where a sample that was loaded shall lie, None if nowhere; and what leaves for it."""

    entry: Entry | None
    freed: tuple[Entry, ...] = ()


class Policy(Protocol):
    """Which samples stay in ``capacity`` bytes; whoever drives it keeps the bytes themselves.

    Attributes: capacity: most bytes of all entries together; never exceeded."""

    capacity: int

    @property
    def held(self) -> Mapping[str, int]:
        """Bytes by the name of the job that had them admitted."""
        ...

    def join(self, job: Job, now: float) -> None:
        """A job comes, or is known better than before: its times were measured."""
        ...

    def leave(self, name: str, now: float) -> tuple[Entry, ...]:
        """A job has ended. Returns: what is no longer kept."""
        ...

    def begin(
        self, name: str, order: Sequence[int], following: Sequence[int] | None, now: float
    ) -> tuple[Entry, ...]:
        """An epoch of a job begins.

        Args:    order: the samples that it will use, each once; following: those of the next epoch, None if
                 this is the last.
        Returns: what is no longer kept."""
        ...

    def use(self, name: str, index: int, now: float) -> Found:
        """A job uses a sample, once an epoch, in about the order that it said."""
        ...

    def offer(self, name: str, index: int, num_bytes: int, now: float) -> Admitted:
        """A job has loaded a sample that its ``use`` did not find.

        An entry that is there already is returned and takes no more space."""
        ...

    def drop(self, entry: Entry) -> None:
        """An entry is gone: its sample changed, or its bytes could not be kept."""
        ...
