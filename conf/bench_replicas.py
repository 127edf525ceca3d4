"""The options of ``penstock bench replicas``; they follow the rules of ``schema.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..compression.errors import ConfigError
from .rules import at_least, shown
from .schema import TrainConfig


@dataclass
class BenchReplicasConfig:
    """The options of ``penstock bench replicas``: one job on one rank and several, replicas among them.

    Attributes:
        parts: what is measured: speeds, stages, exact, bytes
        model: the network; model._target_=my.Net for your own
        data: the samples; data._target_=my.data for your own
        optimizer: what updates the weights
        batch_size: samples in one step
        micro_batches: parts of a batch, which are dealt over replicas; of 12, shares by speed can be exact
        codec: how tensors are packed between stages
        factors: how many times as long as the other rank one of two takes, in the part speeds
        steps: steps of one run
        seconds: how long each rank trains on its own, for the summed speed
        repeats: runs of each side, which take turns; medians count
        seed: decides initial weights, order of samples and random layers
        threads: threads per rank
        deterministic: only algorithms that repeat their bits
        deadline: seconds that any wait between ranks may take before the bench ends
    """

    parts: list[str] = field(default_factory=lambda: ["speeds", "stages", "exact", "bytes"])
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 96
    micro_batches: int = 12
    codec: str = "raw"
    factors: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    steps: int = 2
    seconds: float = 2.0
    repeats: int = 3
    seed: int = 0
    threads: int = 1
    deterministic: bool = True
    deadline: float = 120.0

    def __post_init__(self) -> None:
        for name in ("steps", "repeats", "threads"):
            at_least(1, name, getattr(self, name))
        at_least(2, "micro_batches", self.micro_batches)
        for name in ("parts", "factors"):
            if not (given := getattr(self, name)) or len(set(given)) < len(given):
                raise ConfigError(f"{name}={shown(given)} must name one or more, each once")
        for factor in self.factors:
            at_least(1, "factors", factor)
        if not self.seconds > 0:
            raise ConfigError(f"seconds={self.seconds} must be above 0; write seconds")
        self.job()

    def job(self) -> TrainConfig:
        """What is trained, in the words of ``penstock train``."""
        names = ("model", "data", "optimizer", "batch_size", "micro_batches", "codec", "seed", "threads")
        names += ("deterministic", "deadline")
        return TrainConfig(ranks=1, epochs=1_000_000, **{name: getattr(self, name) for name in names})
