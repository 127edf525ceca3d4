"""The options of ``penstock bench convergence``; they follow the rules of ``schema.py``.

One job is trained under several policies of the weights, from several seeds, on several data sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..compression.errors import ConfigError
from .schema import TrainConfig

SETS = ("digits", "fashion_mnist")


@dataclass
class BenchConvergenceConfig:
    """The options of ``penstock bench convergence``: one job, trained again and again.

    Attributes:
        model: the network; model._target_=my.Net for your own
        optimizer: what updates the weights; its lr is that of synchronous training
        scheduler: the course of the learning rate, one tick an update
        digits: options of the data set, for example digits.size=16
        fashion_mnist: options of the data set, for example fashion_mnist.root=PATH
        sets: data sets to train on, of digits and fashion_mnist
        policies: what to compare; null: all
        seeds: of initial weights and order of samples, one run each
        cuts: cut after these layers or modules
        batch_size: samples in one batch, which is one synchronous update
        micro_batches: parts of a batch; asynchronous training updates after each
        digits_steps: batches of a run on digits
        fashion_mnist_steps: batches of a run on fashion_mnist
        points: how often a run is tested, evenly spread
        test_samples: how many test samples count, the first ones
        async_lr: learning rate of asynchronous updates, relative; null: 1 / micro_batches
        codec: what frames are packed with; no bit of a result depends on it
        processes: runs at once, each on one thread
    """

    model: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    digits: dict[str, Any] = field(default_factory=dict)
    fashion_mnist: dict[str, Any] = field(default_factory=dict)
    sets: list[str] = field(default_factory=lambda: list(SETS))
    policies: list[str] | None = None
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    cuts: list[str] = field(default_factory=lambda: ["layer1", "layer2", "layer3"])
    batch_size: int = 64
    micro_batches: int = 4
    digits_steps: int = 176
    fashion_mnist_steps: int = 320
    points: int = 8
    test_samples: int = 2000
    async_lr: float | None = None
    codec: str = "raw"
    processes: int = 2

    def __post_init__(self) -> None:
        counts = ("digits_steps", "fashion_mnist_steps", "points", "test_samples", "processes")
        for name in (*counts, "batch_size", "micro_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be 1 or more")
        for name in self.sets:
            if name not in SETS:
                raise ConfigError(f"sets holds {name}, which is not known; known are {', '.join(SETS)}")
        for name in ("sets", "seeds", "policies"):
            if (found := getattr(self, name)) is not None and len(set(found)) < max(1, len(found)):
                raise ConfigError(f"{name}={found} must name one or more, each once")
        if self.async_lr is not None and not self.async_lr > 0:
            raise ConfigError(f"async_lr={self.async_lr} must be above 0")

    def steps(self, name: str) -> int:
        """Batches of a run on the data set ``name``."""
        return getattr(self, f"{name}_steps")

    def job(self, name: str, *, schedule: str, seed: int) -> TrainConfig:
        """One run on the data set ``name``, in the words of ``penstock train``."""
        return TrainConfig(
            model=self.model,
            data=getattr(self, name),
            optimizer=dict(self.optimizer),
            scheduler=self.scheduler,
            ranks=1,  # all stages live in one process here: no bit depends on where they do
            cuts=self.cuts,
            schedule=schedule,
            codec=self.codec,
            batch_size=self.batch_size,
            micro_batches=self.micro_batches,
            seed=seed,
            threads=1,
            max_steps=self.steps(name),
        )
