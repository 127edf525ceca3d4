"""The options of ``penstock bench checkpoint``; they follow the rules of ``schema.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..compression.errors import ConfigError
from .rules import at_least, shown
from .schema import CheckpointConfig, TrainConfig


@dataclass
class BenchCheckpointConfig:
    """The options of ``penstock bench checkpoint``: one job, with checkpoints and without.

    Attributes:
        model: the network; model._target_=my.Net for your own
        data: the samples; data._target_=my.data for your own
        optimizer: what updates the weights; what it keeps is part of a checkpoint
        ranks: processes on this machine, one stage each
        cuts: cut after these layers or modules, by hand: cuts=[layer2]; null: the planner's choice
        batch_size: samples in one step
        micro_batches: parts of a batch, which follow each other through the stages
        codec: how tensors are packed between stages
        every: steps from one checkpoint to the next, and steps of one run
        repeats: pairs of runs, one with checkpoints and one without; medians count
        starts: pairs of starts, one anew and one from a checkpoint, each until its first step
        codecs: what parts would be packed with, to see how much smaller they became
        seed: decides initial weights, order of samples and random layers
        threads: threads per rank; null: the cores available divided by the ranks
        deterministic: only algorithms that repeat their bits
        deadline: seconds that any wait between ranks may take before the bench ends
    """

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    cuts: list[str] | None = None
    batch_size: int = 128
    micro_batches: int = 8
    codec: str = "raw"
    every: int = 10
    repeats: int = 5
    starts: int = 3
    codecs: list[str] = field(default_factory=lambda: ["zero_value", "exponent", "byte_plane"])
    seed: int = 0
    threads: int | None = None
    deterministic: bool = True
    deadline: float = 120.0

    def __post_init__(self) -> None:
        for name in ("every", "repeats", "starts"):
            at_least(1, name, getattr(self, name))
        if len(set(self.codecs)) < len(self.codecs):
            raise ConfigError(f"codecs={shown(self.codecs)} must name each once")
        self.job()

    def job(self) -> TrainConfig:
        """What is trained, in the words of ``penstock train``."""
        names = (
            "model",
            "data",
            "optimizer",
            "ranks",
            "cuts",
            "batch_size",
            "micro_batches",
            "codec",
            "seed",
        )
        names += ("threads", "deterministic", "deadline")
        return TrainConfig(
            **{name: getattr(self, name) for name in names},
            checkpoint=CheckpointConfig(every=self.every),
            epochs=1_000_000,  # as many as it takes
        )
