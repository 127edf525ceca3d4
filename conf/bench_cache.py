"""The options of ``penstock bench cache``; they follow the rules of ``schema.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..compression.errors import ConfigError
from .rules import at_least, shown


@dataclass
class BenchCacheConfig:
    """The options of ``penstock bench cache``.

    Attributes:
        parts: what is measured; simulated; real, by processes behind a slow store; hit, loaders, jobs
        policies: of the cache; next_use_told: without what it sees of the jobs; gain_last_0: last_gain=0
        jobs: how many run side by side
        shares: capacity by all samples that there are, above 0 and up to 1
        reads: own, a data set for each job; same, one for all
        num_samples: of a data set
        batch_size: samples in a batch
        epochs: of each job; hits count from the second on
        sample_bytes: size of a sample
        error: what a job says of its epoch is off by up to this share, in a second run of next_use
        rate: bytes a second of the storage where jobs wait for it
        latency: seconds of a read from it
        lookahead: batches that its readers load ahead
        repeats: turns of each side, where sides take turns
        seed: decides orders, phases and errors
    """

    parts: list[str] = field(default_factory=lambda: ["simulated"])
    policies: list[str] = field(
        default_factory=lambda: [
            *("lru", "never_evict", "static_split", "gain", "gain_last_0", "next_use", "next_use_told")
        ]
    )
    jobs: list[int] = field(default_factory=lambda: [8])
    shares: list[float] = field(default_factory=lambda: [0.05, 0.1, 0.25])
    reads: list[str] = field(default_factory=lambda: ["own", "same"])
    num_samples: int = 1000
    batch_size: int = 25
    epochs: int = 6
    sample_bytes: Any = "110kB"
    error: float = 0.1
    rate: Any = "60MB"
    latency: float = 0.002
    lookahead: int = 2
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_samples", "batch_size", "repeats"):
            at_least(1, name, getattr(self, name))
        at_least(2, "epochs", self.epochs)
        at_least(0, "lookahead", self.lookahead)
        for name in ("parts", "policies", "jobs", "shares", "reads"):
            listed = [str(item) for item in getattr(self, name)]
            if not listed or len(set(listed)) < len(listed):
                raise ConfigError(f"{name}={shown(listed)} must name one or more, each once")
        for number in self.jobs:
            at_least(1, "jobs", number)
        for share in self.shares:
            if not 0 < share <= 1:
                raise ConfigError(
                    f"shares={shown([str(s) for s in self.shares])} must be above 0 and up to 1"
                )
        if not 0 <= self.error < 1 or not self.latency >= 0:
            raise ConfigError(f"error={self.error} must be 0 to 1 and latency={self.latency} 0 or more")
