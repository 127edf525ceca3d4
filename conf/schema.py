"""What may be configured: one dataclass per command, each option with its default, its meaning and its rule.

Hydra checks names and types against these classes; rules between options are checked in ``__post_init__``,
which runs when ``OmegaConf.to_object`` makes the object. Plain dataclasses, since Hydra writes to them. Their
``Attributes`` are what ``--help`` prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..compression.errors import ConfigError

TIERS = ("device", "packed", "host")


@dataclass
class MemoryConfig:
    """How much memory there is, and where saved tensors wait for their backward.

    Attributes:
        device: largest memory of a rank, for the planner, for example 2GiB; null: unlimited
        tier: where what a forward saves stays until its backward: device, packed or host
    """

    device: Any = None
    tier: str = "device"

    def __post_init__(self) -> None:
        if self.tier not in TIERS:
            raise ConfigError(f"memory.tier={self.tier} is not known; known are {', '.join(TIERS)}")


@dataclass
class ClipConfig:
    """Gradient clipping.

    Attributes:
        norm: largest global L2 norm of the gradients; null: no clipping
    """

    norm: float | None = None

    def __post_init__(self) -> None:
        if self.norm is not None and not self.norm > 0:
            raise ConfigError(f"clip.norm={self.norm} must be above 0; leave it out to clip nothing")


@dataclass
class PlanConfig:
    """What a plan depends on; the options of ``penstock plan``.

    Attributes:
        model: the network; model._target_=my.Net for your own
        data: the samples; data._target_=my.samples for your own
        ranks: processes on this machine; 1 runs all stages in one process
        stages: pipeline stages; null: one per rank, or one more than cuts
        cuts: cut after these layers or modules, by hand: cuts=[layer2,layer3.0]
        schedule: order of forwards and backwards: 1f1b or gpipe
        codec: how tensors are packed between stages: auto measures and chooses; or the name of a codec
        batch_size: samples in one step
        micro_batches: parts of a batch, which follow each other through the stages
        extra_in_flight: micro-batches in flight beyond plain 1f1b, to hide a slow link
        link: speed between ranks, for the planner, for example 1Gbit; null: unlimited
        memory: limits for the planner
        seed: decides initial weights, order of samples and random layers
        threads: threads per rank; null: the cores available divided by the ranks
        deterministic: only algorithms that repeat their bits
        device: what computes; only cpu so far
    """

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    stages: int | None = None
    cuts: list[str] | None = None
    schedule: str = "1f1b"
    codec: str = "auto"
    batch_size: int = 128
    micro_batches: int = 8
    extra_in_flight: int = 0
    link: Any = None
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    seed: int = 0
    threads: int | None = None
    deterministic: bool = True
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("ranks", "stages", "batch_size", "micro_batches", "threads"):
            _at_least(1, name, getattr(self, name))
        for name in ("extra_in_flight", "seed"):
            _at_least(0, name, getattr(self, name))
        if self.device != "cpu":
            raise ConfigError(f"device={self.device} is not known; Penstock computes on device=cpu so far")
        self._check_stages()

    def _check_stages(self) -> None:
        num_stages = self.ranks if self.stages is None else self.stages
        if self.cuts is not None:
            num_stages = len(self.cuts) + 1
            if self.stages not in (None, num_stages):
                raise ConfigError(
                    f"stages={self.stages} contradicts cuts={shown(self.cuts)}, which make {num_stages};"
                    " leave out one of them"
                )
        if self.ranks > num_stages:
            raise ConfigError(
                f"ranks={self.ranks} is more than the {num_stages} stages, and a rank needs at least one;"
                f" lower ranks to {num_stages}, or ask for more stages"
            )


@dataclass
class TrainConfig(PlanConfig):
    """The options of ``penstock train``; those of a plan, and these.

    Attributes:
        plan: follow this plan.json of penstock plan, instead of planning anew
        optimizer: what updates the weights; any torch optimizer by optimizer._target_=
        scheduler: the course of the learning rate, one tick a step
        clip: gradient clipping
        epochs: how often every training sample is seen
        max_steps: stop after this many steps; null: no limit
        deadline: seconds that any wait between ranks may take before the run ends
        versions: written into config.yaml by a run, never read
    """

    plan: str | None = None
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] = field(default_factory=dict)
    clip: ClipConfig = field(default_factory=ClipConfig)
    epochs: int = 4
    max_steps: int | None = None
    deadline: float = 60.0
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "max_steps"):
            _at_least(1, name, getattr(self, name))
        if not self.deadline > 0:
            raise ConfigError(f"deadline={self.deadline} must be above 0; write seconds")
        if self.plan is not None and self.cuts is not None:
            raise ConfigError(f"plan={self.plan} already decides the cuts; drop cuts={shown(self.cuts)}")


@dataclass
class BenchCodecsConfig(PlanConfig):
    """The options of ``penstock bench codecs``; those of a plan, for classes=[job], and these.

    Attributes:
        optimizer: what updates the weights before real tensors are taken
        classes: tensors measured: synthetic, images, text, integers, masks; job: what crosses this job's cuts
        codecs: only these, of Penstock's and the others'; null: all that apply
        sizes: bytes of the synthetic tensors
        densities: shares of their elements that are not zero
        dtypes: floats that synthetic tensors are made in, and real ones cast to
        isa: kernels: avx512, avx2 or portable; null: the machine's best, and encode and decode beside them
        capture_steps: steps a network trains before its tensors are taken
        repeats: most alternating runs of all routes; medians count
    """

    optimizer: dict[str, Any] = field(default_factory=dict)
    classes: list[str] = field(default_factory=lambda: ["synthetic", "images", "text", "integers", "masks"])
    codecs: list[str] | None = None
    sizes: list[Any] = field(default_factory=lambda: ["32MiB"])
    densities: list[float] = field(default_factory=lambda: [0.1, 0.5, 0.9, 1.0])
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    isa: str | None = None
    capture_steps: int = 10
    repeats: int = 9

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("capture_steps", "repeats"):
            _at_least(1, name, getattr(self, name))
        for density in self.densities:
            if not 0 <= density <= 1:
                raise ConfigError(f"densities={self.densities} must lie between 0 and 1, found {density}")


def shown(names: list[str]) -> str:
    """Return the list as it is typed on the command line."""
    return f"[{','.join(names)}]"


def _at_least(least: int, name: str, value: int | None) -> None:
    if value is not None and value < least:
        raise ConfigError(f"{name}={value} must be {least} or more")
