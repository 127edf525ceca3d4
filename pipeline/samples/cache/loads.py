"""What the simulator is given of a job, and what it tells of it.

Source of the utilisation: MLPerf Storage, AU = seconds of computing / seconds of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from ....compression.errors import ConfigError
from .policy import Job, Times


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One job that is simulated.

    Attributes:
        data:         None: its own. Sizes of samples belong to the data.
        sample_bytes: mean size of a sample. spread: sigma of the logarithm of sizes; 0: all alike.
        training, augmentation: seconds of a batch.
        start:        when it begins.
        error:        what it says of its epoch is so many times as long.
    """

    name: str
    num_samples: int
    batch_size: int
    epochs: int
    training: float
    data: str | None = None
    augmentation: float = 0.0
    sample_bytes: int = 110_000
    spread: float = 0.0
    start: float = 0.0
    error: float = 1.0

    def __post_init__(self) -> None:
        least = min(self.num_samples, self.batch_size, self.epochs, self.sample_bytes)
        if least < 1 or min(self.training, self.augmentation, self.spread, self.start) < 0:
            raise ConfigError(
                f"a job has 1 sample, batch, epoch and byte or more, no time below 0; found {self}"
            )

    @property
    def reads(self) -> str:
        """The name of its data."""
        return self.data or self.name

    def job(self, times: Times | None) -> Job:
        """What a policy is told of it."""
        return Job(
            name=self.name,
            data=self.reads,
            num_samples=self.num_samples,
            batch_size=self.batch_size,
            times=times,
        )

    def sizes(self, seed: int) -> np.ndarray:
        """Bytes of each sample."""
        if not self.spread:
            return np.full(self.num_samples, self.sample_bytes)
        drawn = np.random.default_rng([seed, crc32(self.reads.encode())])
        mean = np.log(self.sample_bytes) - self.spread**2 / 2
        return np.maximum(1, drawn.lognormal(mean, self.spread, self.num_samples)).astype(np.int64)

    def order(self, epoch: int, seed: int) -> list[int] | None:
        """The samples of an epoch; None behind the last."""
        if epoch >= self.epochs:
            return None
        drawn = np.random.default_rng([seed, crc32(self.name.encode()), 1 + epoch])
        return drawn.permutation(self.num_samples).tolist()


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a job.

    Attributes:
        uses, hits: by epoch. loads: from storage. bytes_loaded: by them.
        begin, end: its first and last second. computing: seconds of training. stalled: of waiting for reads.
        reading:    seconds of loading, whether or not anybody waited.
    """

    name: str
    uses: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    loads: int = 0
    bytes_loaded: int = 0
    begin: float = 0.0
    end: float = 0.0
    computing: float = 0.0
    stalled: float = 0.0
    reading: float = 0.0

    def hit_rate(self, since: int = 1) -> float:
        """Hits by uses from an epoch on, counted from 0: nothing is there to be hit in the first."""
        return sum(self.hits[since:]) / max(1, sum(self.uses[since:]))

    @property
    def seconds(self) -> float:
        """Of the whole run."""
        return self.end - self.begin

    @property
    def utilisation(self) -> float:
        """AU of MLPerf Storage."""
        return self.computing / self.seconds if self.seconds else 1.0

    @property
    def stall_share(self) -> float:
        """Seconds in which training waited for reads, by all."""
        return self.stalled / self.seconds if self.seconds else 0.0
