"""Options of the commands: one dataclass per command, each option with its default, its meaning and its rule.

Hydra checks names and types against these classes; rules between options are checked in ``__post_init__``,
which runs when ``OmegaConf.to_object`` makes the object. Plain dataclasses, since Hydra writes to them. Their
``Attributes`` are what ``--help`` prints."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..compression.errors import ConfigError
from ..compression.names import AUTO, is_device
from .parts import (
    CacheConfig,
    CheckpointConfig,
    ClipConfig,
    EvalConfig,
    MemoryConfig,
    ReplicasConfig,
    at_least,
    count_or_auto,
    one_of,
    shown,
)

CASTS = ("bfloat16", "float16")

LOGGERS = ("csv", "tensorboard", "wandb")

AGAIN = "auto"  # of ``resume=``: the run in the same folder

TWO_A_RANK = ("interleaved", "zbv", "dualpipev")  # schedules whose ranks take two stages or more


@dataclass
class PlanConfig:
    """Options of ``penstock plan``: all that a plan depends on.

    Attributes:
        model: the network; model._target_=my.Net for your own
        data: the samples; data._target_=my.data for your own Dataset, DataLoader or a (train, test) pair
        loss: what training lowers: cross_entropy; model, which returns it; loss._target_=my.loss for your own
        optimizer: what updates the weights
        ranks: processes, of all machines together; 1 runs all stages in one process
        stages: pipeline stages; null: one a rank (two where the schedule takes two), or one more than cuts
        cuts: cut after these layers or modules, by hand: cuts=[layer2,layer3.0]
        schedule: gpipe, 1f1b, interleaved, zb_h1, zbv, dualpipev, async_1f1b, custom; penstock plan: also all
        program: file of a custom schedule, a line of instructions such as 0F0 0F1 0B0 0B1 for each rank
        weights: version a micro-batch sees: latest; async_1f1b: stashed, vertical_sync; 1f1b: double_buffered
        weights_first: in a backward, a layer's weight gradient comes before the gradient of its input
        recompute: keep nothing of a forward but what entered: it runs again ahead of its backward
        prediction: with async_1f1b, forwards run with the weights expected at their backward
        codec: how tensors are packed between stages: auto measures and chooses; or the name of a codec
        batch_size: samples in one step
        micro_batches: parts of a batch, which follow each other through the stages
        extra_in_flight: micro-batches in flight beyond plain 1f1b, for a slow link; auto: up to 2, by measure
        link: speed between ranks, for the planner, for example 1Gbit; null: unlimited
        memory: limits for the planner
        replicas: ranks that share the micro-batches of a stage
        seed: decides initial weights, order of samples and random layers
        threads: threads per rank; null: the cores available divided by the ranks
        deterministic: only algorithms that repeat their bits
        device: what computes: cpu; cuda, each rank a GPU or a share of one; auto, cuda where there is one
        tf32: on a GPU, products and convolutions of float32 in TF32, which is faster and less exact
    """

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    stages: int | None = None
    cuts: list[str] | None = None
    schedule: str = "1f1b"
    program: str | None = None
    weights: str = "latest"
    weights_first: bool = False
    recompute: bool = False
    prediction: bool = False
    codec: str = "auto"
    batch_size: int = 128
    micro_batches: int = 8
    extra_in_flight: Any = "auto"
    link: Any = None
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)
    seed: int = 0
    threads: int | None = None
    deterministic: bool = True
    device: str = "cpu"
    tf32: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "stages", "batch_size", "micro_batches", "threads"):
            at_least(1, name, getattr(self, name))
        at_least(0, "seed", self.seed)
        count_or_auto("extra_in_flight", self.extra_in_flight)
        if self.micro_batches > self.batch_size:
            raise ConfigError(
                f"batch_size={self.batch_size} is too small for micro_batches={self.micro_batches}, each of "
                f"which has a sample at least; lower micro_batches to {self.batch_size}, or raise batch_size"
            )
        if self.device != AUTO and not is_device(self.device):
            raise ConfigError(f"device={self.device} is not known; known are cpu, cuda, cuda:N and auto")
        if self.program is not None and self.schedule != "custom":
            raise ConfigError(
                f"program={self.program} is for schedule=custom, found schedule={self.schedule}; drop either"
            )

    @property
    def num_stages(self) -> int:
        """Stages that are asked for."""
        if self.cuts is not None:
            return len(self.cuts) + 1
        if self.stages is not None:
            return self.stages
        return self.replicas.num_stages(self.ranks) * (2 if self.schedule in TWO_A_RANK else 1)


@dataclass
class TrainConfig(PlanConfig):
    """The options of ``penstock train``; those of a plan, and these.

    Attributes:
        plan: follow this plan.json of penstock plan, instead of planning anew
        scheduler: the course of the learning rate, one tick a step
        clip: gradient clipping
        autocast: float that forwards and losses are cast to: bfloat16 or float16; null: no cast
        loss_scale: factor of the loss, for float16: a number, or dynamic (a GradScaler); null: none
        detect_anomaly: stop where an output, a gradient or the loss is first NaN, and name its layer
        nan: what a loss that is no number does: stop, with exit code 3; warn
        epochs: how often every training sample is seen
        max_steps: stop after this many steps; null: no limit
        deadline: seconds that any wait between ranks may take before the run ends
        max_restarts: how often ranks that were killed, lost or hang are started again from a checkpoint
        min_ranks: fewest ranks to go on with where one is lost again at once; null: all
        cache: a cache of samples that the training jobs of this machine share: cache=shared; none
        checkpoint: when the run writes one, and how many it keeps
        eval: when the run tests, and whether tests end it
        resume: go on from a checkpoint: auto, of the same hydra.run.dir; or the folder of a run or checkpoint
        logger: who else is told of the steps: csv, tensorboard, wandb, or several: logger=[csv,wandb]
        traceback: print the traceback of what failed, which is else in errors/ of the run folder only
        versions: written into config.yaml by a run, never read
        settings: the same, of how torch is set, for the bits of a GPU
    """

    plan: str | None = None
    scheduler: dict[str, Any] = field(default_factory=dict)
    clip: ClipConfig = field(default_factory=ClipConfig)
    autocast: str | None = None
    loss_scale: Any = None
    detect_anomaly: bool = False
    nan: str = "stop"
    epochs: int = 4
    max_steps: int | None = None
    deadline: float = 60.0
    max_restarts: int = 0
    min_ranks: int | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    resume: str | None = None
    logger: Any = None
    traceback: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epochs", "max_steps"):
            at_least(1, name, getattr(self, name))
        if not self.deadline > 0:
            raise ConfigError(f"deadline={self.deadline} must be above 0; write seconds")
        if self.plan is not None and self.cuts is not None:
            raise ConfigError(f"plan={self.plan} already decides the cuts; drop cuts={shown(self.cuts)}")
        if self.plan is not None and self.program is not None:
            raise ConfigError(f"plan={self.plan} already has its schedule; drop program={self.program}")
        for name, reason in {"minutes": "hangs on the clock", "best": "depends on a test"}.items():
            if self.streams and (value := getattr(self.checkpoint, name)) is not None:
                raise ConfigError(
                    "a checkpoint drains what is in flight without a flush, so its step decides bits, and "
                    f"checkpoint.{name}={value} {reason}; give checkpoint.every="
                )
        one_of(("stop", "warn"), "nan", self.nan)
        for name in self.loggers:
            one_of(LOGGERS, "logger", name)
        self._check_update()
        self._check_restarts()
        self._check_replicas()

    @property
    def loggers(self) -> tuple[str, ...]:
        """The names in ``logger=``."""
        names = [] if self.logger is None else self.logger
        return tuple(names if isinstance(names, list) else [names])

    @property
    def streams(self) -> bool:
        """True if micro-batches are in flight between steps, so that a checkpoint drains them."""
        return self.schedule == "async_1f1b" or self.weights == "double_buffered"

    def _check_replicas(self) -> None:
        if self.replicas.shrink and not self.replicas.several and self.plan is None:
            raise ConfigError(
                "replicas.shrink=true does without a replica that is lost, found replicas.count=1; add "
                "replicas.count=, or take max_restarts= and min_ranks="
            )
        if self.replicas.threads and self.ranks == 1:
            raise ConfigError("replicas.threads=true gives each rank a thread, found ranks=1; raise ranks")
        if self.replicas.threads and self.max_restarts:
            raise ConfigError(
                "threads of one process are lost together, so none is started again, found "
                f"replicas.threads=true and max_restarts={self.max_restarts}; drop either"
            )

    def _check_restarts(self) -> None:
        at_least(0, "max_restarts", self.max_restarts)
        at_least(1, "min_ranks", self.min_ranks)
        if self.min_ranks in (None, self.ranks):
            return
        if self.min_ranks > self.ranks:
            raise ConfigError(f"min_ranks={self.min_ranks} is more than ranks={self.ranks}; lower it")
        if not self.max_restarts:
            raise ConfigError(f"min_ranks={self.min_ranks} is for restarts; add max_restarts=")
        stream = f"weights={self.weights} of schedule={self.schedule}, which resumes on the same cuts"
        several = f"replicas.count={self.replicas.count}, which shrinks by replicas.shrink=true"
        fixed = [stream] * self.streams + [several] * self.replicas.several
        fixed += [f"{name}={value}" for name in ("plan", "program") if (value := getattr(self, name))]
        if fixed:  # it does not let ranks become fewer
            raise ConfigError(f"min_ranks={self.min_ranks} does not go with {fixed[0]}; drop either")

    def _check_update(self) -> None:
        if self.autocast is not None:
            one_of(CASTS, "autocast", self.autocast)
        scale = self.loss_scale
        number = isinstance(scale, int | float) and not isinstance(scale, bool) and 0 < scale < math.inf
        if scale not in (None, "dynamic") and not number:
            raise ConfigError(
                f"loss_scale={scale} must be dynamic or a number above 0; leave it out for none"
            )
        if self.schedule != "async_1f1b":
            return
        alone = "schedule=async_1f1b has no moment at which all stages hold the same step"
        if self.clip.norm is not None and self.clip.scope == "global":
            raise ConfigError(f"{alone}, and clip.norm={self.clip.norm} needs one; add clip.scope=stage")
        if scale == "dynamic":
            raise ConfigError(f"{alone}, and loss_scale=dynamic needs one; give a number: loss_scale=1024")


@dataclass
class PlanningMemoryConfig(MemoryConfig):
    """Limits of memory, the tiers of what waits, and whether to list what fills it.

    Attributes:
        table: print what every layer saves for its backward, and write all of it to memory.csv
    """

    table: bool = False


@dataclass
class PlanningConfig(PlanConfig):
    """The options of ``penstock plan``: those of a plan, and these.

    Attributes:
        graph: draw which layer depends on which data, to graph.png, and write it to graph.json
    """

    graph: bool = False
    memory: PlanningMemoryConfig = field(  # pyright: ignore[reportIncompatibleVariableOverride] more of it
        default_factory=PlanningMemoryConfig
    )
