"""The options of ``penstock bench offload``; they follow the rules of ``schema.py``.

They are no ``PlanConfig``: a job is trained by several contestants, within several limits, on one stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..compression.errors import ConfigError
from .rules import at_least, shown
from .schema import TrainConfig


@dataclass
class BenchOffloadConfig:
    """The options of ``penstock bench offload``: what it costs to move to a tier what is not read right now.

    Attributes:
        model: the network of the case disk; model._target_=my.Net for your own
        data: the samples; those of the networks of the case packed too, but for gpt, which reads text
        optimizer: what updates the weights
        cases: what is measured, of disk, packed and placement
        contestants: of the case disk: disk, disk_parameters, auto (of 0.7 of a limit), and kept, always there
        limits: memory of a contestant above its start: 2GiB, 50% of what everything kept needs, or null
        networks: of the case packed: resnet18, vgg11_bn, squeezenet1_1, densenet121, mobilenet_v3_small, gpt
        corpora: folder with NAME.LIMIT.csv of id,lower,upper,size for the case placement; null: traces only
        traces: networks of which one step is placed; of the same names, and resnet50
        batch_size: samples in one step
        micro_batches: parts of a batch, which follow each other
        codec: how tensors are packed in their tier: auto, or the name of a codec
        repeats: runs of each side, in turn; medians count
        steps: steps of one run, behind as many as warm up
        warmup: steps of each run before anything is timed
        speed_bytes: so many bytes are written and read for the speed of the disk
        path: folder of the disk's file; null: the one for temporary files
        seed: decides initial weights, order of samples and random layers
        threads: threads that compute; those that move stand beside them
        deterministic: only algorithms that repeat their bits
        deadline: seconds that one run may take before the bench ends
    """

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    cases: list[str] = field(default_factory=lambda: ["disk", "packed", "placement"])
    contestants: list[str] = field(default_factory=lambda: ["disk", "disk_parameters"])
    limits: list[Any] = field(default_factory=lambda: [None, "50%"])
    networks: list[str] = field(default_factory=lambda: ["resnet18"])
    corpora: str | None = None
    traces: list[str] = field(default_factory=lambda: ["resnet18"])
    batch_size: int = 64
    micro_batches: int = 1
    codec: str = "auto"
    repeats: int = 3
    steps: int = 3
    warmup: int = 1
    speed_bytes: Any = "256MiB"
    path: str | None = None
    seed: int = 0
    threads: int = 1
    deterministic: bool = True
    deadline: float = 600.0

    def __post_init__(self) -> None:
        for name in ("repeats", "steps", "warmup"):
            at_least(1, name, getattr(self, name))
        for name in ("cases", "contestants", "limits", "networks", "traces"):
            listed = ["null" if item is None else str(item) for item in getattr(self, name)]
            if not listed or len(set(listed)) < len(listed):
                raise ConfigError(f"{name}={shown(listed)} must name one or more, each once")
        if not self.deadline > 0:
            raise ConfigError(f"deadline={self.deadline} must be above 0")
        self.job()

    def job(self, **instead: Any) -> TrainConfig:
        """What is trained, in the words of ``penstock train``; ``instead``: what it has its own of."""
        names = ("model", "data", "optimizer", "batch_size", "micro_batches", "codec", "seed", "threads")
        given = {name: getattr(self, name) for name in (*names, "deterministic")} | instead
        if given["data"]:
            given["data"] = given["data"] | {"drop_last": True}  # every batch has the same size
        return TrainConfig(ranks=1, stages=1, epochs=1_000_000, **given)
