"""Options of the commands: one dataclass per command, each option with its default, its meaning and its rule.

Hydra checks names and types against these classes; rules between options are checked in ``__post_init__``,
which runs when ``OmegaConf.to_object`` makes the object. Plain dataclasses, since Hydra writes to them. Their
``Attributes`` are what ``--help`` prints."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..compression.errors import ConfigError
from ..compression.names import AUTO, is_device

CASTS = ("bfloat16", "float16")
LOGGERS = ("csv", "tensorboard", "wandb")
AGAIN = "auto"  # of ``resume=``: the run in the same folder
EVEN, MEASURED = SHARES = ("even", "measured")  # of replicas, beside weights
TWO_A_RANK = ("interleaved", "zbv", "dualpipev")  # schedules whose ranks take two stages or more


def shown(names: list[str]) -> str:
    """Return the list as it is typed on the command line."""
    return f"[{','.join(names)}]"


def one_of(known: Sequence[str], name: str, value: str) -> None:
    """Refuse a name that is not known."""
    if value not in known:
        raise ConfigError(f"{name}={value} is not known; known are {', '.join(known)}")


def count_or_auto(name: str, value: Any, *, least: int = 0) -> Any:
    """Return "auto" or a count; refuse what is neither, or less than ``least``."""
    value = int(value) if isinstance(value, str) and value.isdecimal() else value
    if value != AUTO and (type(value) is not int or value < least):
        found = "null" if value is None else value
        raise ConfigError(f"{name}={found} must be auto, or {least} or more")
    return value


def at_least(least: int, name: str, value: int | None) -> None:
    """Refuse a count below its least; None is no count."""
    if value is not None and value < least:
        raise ConfigError(f"{name}={value} must be {least} or more")


@dataclass
class MemoryConfig:
    """Limits of memory, and the tiers of what is not read right now.

    Attributes:
        device: most bytes of a rank, for example 2GiB, or 25% of what it holds if nothing moves; null: any
        host: most bytes of the tier host on a rank, for example 8GiB; null: any
        tier: where what a forward saves stays until its backward: device, packed, host or disk, or auto
        weights: where older versions of the weights stay until they are read: device, packed, host or disk
        parameters: where parameters and their optimizer state are while no layer reads them: the same
        prefetch_layers: so many layers ahead of a backward, what it reads is brought back from its tier; auto
        writeout_layers: what the next so many layers read stays, of what is saved and of parameters; auto
        path: folder of the file of the tier disk; null: the run folder
        disk: most bytes of that file on a rank, for example 20GiB; 0: no disk; null: unlimited
    """

    device: Any = None
    host: Any = None
    tier: str = "auto"
    weights: str = "device"
    parameters: str = "auto"
    prefetch_layers: Any = "auto"
    writeout_layers: Any = "auto"
    path: str | None = None
    disk: Any = None

    def __post_init__(self) -> None:
        for name in ("prefetch_layers", "writeout_layers"):
            setattr(self, name, count_or_auto(f"memory.{name}", getattr(self, name)))


@dataclass
class ClipConfig:
    """Gradient clipping.

    Attributes:
        norm: largest L2 norm of the gradients; null: no clipping
        scope: the norm of what: global, of all gradients; stage, of those of each stage
    """

    norm: float | None = None
    scope: str = "global"

    def __post_init__(self) -> None:
        if self.norm is not None and not self.norm > 0:
            raise ConfigError(f"clip.norm={self.norm} must be above 0; leave it out to clip nothing")
        one_of(("global", "stage"), "clip.scope", self.scope)


@dataclass
class CacheConfig:
    """A cache of samples that the training jobs of a machine share; ``cache=shared`` says its mode.

    Attributes:
        mode: none, or shared: samples go through the broker of this machine (penstock cache serve)
        socket: where the broker listens; null: where it does by default
        backend: a server in its place, for several machines: redis://HOST:PORT/DB; null: the broker
        job: the name of the run in penstock cache status; null: that of its folder
        data: name of the samples, for jobs that share them; null: files by their paths, others with nobody
        decoded: keep whole samples of data that do not tell how they read and decode one
        share: the part of a cache with policy=gain that counts as this job's, like 0.25; null: what others
            leave, in equal parts
    """

    mode: str = "none"
    socket: str | None = None
    backend: str | None = None
    job: str | None = None
    data: str | None = None
    decoded: bool = False
    share: float | None = None

    def __post_init__(self) -> None:
        one_of(("none", "shared"), "cache", self.mode)
        if self.share is not None and not 0 < self.share <= 1:
            raise ConfigError(f"cache.share={self.share} must be above 0 and up to 1, the whole cache")
        if self.share is not None and self.backend is not None:
            raise ConfigError("cache.share= is for this machine's broker, not cache.backend=; leave one out")
        if self.backend is not None and not self.backend.startswith(("redis://", "rediss://", "unix://")):
            raise ConfigError(
                f"cache.backend={self.backend} is the address of a Redis server, redis://HOST:PORT/DB; leave "
                "it out for the broker of this machine"
            )


@dataclass
class CheckpointConfig:
    """When a run writes a checkpoint, beside the training.

    Attributes:
        every: steps from one checkpoint to the next; null: none by steps
        minutes: minutes from one checkpoint to the next; null: none by time
        keep: how many of the newest stay
        best: also one after the best test, by its loss or its accuracy: checkpoints/best; null: none
    """

    every: int | None = None
    minutes: float | None = None
    keep: int = 3
    best: str | None = None

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            at_least(1, f"checkpoint.{name}", getattr(self, name))
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"checkpoint.minutes={self.minutes} must be above 0; leave it out for none")
        if self.best is not None:
            one_of(("loss", "accuracy"), "checkpoint.best", self.best)


@dataclass
class EvalConfig:
    """When a run tests, beside the end of each epoch.

    Attributes:
        every: steps from one test to the next; null: only at the end of an epoch
        patience: tests in a row without a better checkpoint.best= (else loss) that end the run; null: never
    """

    every: int | None = None
    patience: int | None = None

    def __post_init__(self) -> None:
        for name in ("every", "patience"):
            at_least(1, f"eval.{name}", getattr(self, name))


@dataclass
class DigestConfig:
    """Digests of what each step leaves, for penstock diff.

    Attributes:
        every: steps from one line of digests.jsonl to the next; null: none
        layers: also of what each layer returns for each micro-batch, and of its gradient
    """

    every: int | None = None
    layers: bool = False

    def __post_init__(self) -> None:
        at_least(1, "digest.every", self.every)
        if self.layers and self.every is None:
            raise ConfigError("digest.layers=true adds to lines of digests, found none; add digest.every=10")


@dataclass
class AuditConfig:
    """Steps that are repeated while a run goes on, to find a machine that computes wrongly.

    Attributes:
        every: time from one audit of a step to the next, as 30min or 1h; null: none
    """

    every: str | None = None


@dataclass
class ReplicasConfig:
    """Ranks that share the micro-batches of a stage.

    Attributes:
        count: ranks of every stage; of each by a list such as [2,1]; auto: the fastest; ranks= is their sum
            where each rank runs one stage
        exact: they add gradients micro-batch by micro-batch, for the bits of one rank; takes memory and bytes
        sharded: each updates some parameters for all, and keeps the optimizer's state of these only;
            always so with memory.parameters=
        owner: which one updates a parameter then: spread, by bytes; or first, all of them
        shrink: a replica that is lost is done without: the run goes on from its last checkpoint
        shares: even; measured, by speed, as it is from step to step; or weights of all ranks: [3,1]
        threads: in training all ranks are threads of one process
        idle: with count=auto, ranks that would not shorten the simulated step are left out
        check: when what they hold is compared: rarely, which is each hundredth update; digest, each one
    """

    count: Any = 1
    exact: bool = False
    sharded: bool = False
    owner: str = "spread"
    shrink: bool = False
    shares: Any = "even"
    threads: bool = False
    idle: bool = False
    check: str = "rarely"

    def __post_init__(self) -> None:
        one_of(("rarely", "digest"), "replicas.check", self.check)
        weights = isinstance(self.shares, list) and self.shares != []
        if not (self.shares in SHARES or (weights and all(type(n) is int and n >= 0 for n in self.shares))):
            raise ConfigError(
                f"replicas.shares={self.shares} must be {', '.join(SHARES)}, or whole numbers from 0, one "
                "for each rank, as [3,1]"
            )

    @property
    def several(self) -> bool:
        """True if a stage may have more than one."""
        return self.count != 1

    def num_stages(self, ranks: int) -> int:
        """Return the least number of stages on so many ranks."""
        if self.count == AUTO:
            return 1
        return len(self.count) if isinstance(self.count, list) else max(1, ranks // self.count)

    def of_stages(self, num_stages: int) -> list[int]:
        """Return the least number that each stage has."""
        count = 1 if self.count == AUTO else self.count
        return list(count) if isinstance(count, list) else [count] * num_stages


@dataclass
class PlanConfig:
    """Options of ``penstock plan``: all that a plan depends on.

    Attributes:
        model: the network; model._target_=my.Net for your own
        data: the samples; data._target_=my.data for your own Dataset, DataLoader or a (train, test) pair
        loss: what training lowers: cross_entropy; model, which returns it; loss._target_=my.loss for your own
        optimizer: what updates the weights
        ranks: processes, of all machines together; 1 runs all stages in one process; auto: by simulated steps
        stages: pipeline stages; null: one a rank (two where the schedule takes two), or one more than cuts
        cuts: cut after these layers or modules, by hand: cuts=[layer2,layer3.0]
        schedule: gpipe, 1f1b, interleaved, zb_h1, zbv, dualpipev, async_1f1b, custom; auto: the
            shortest simulated step of those with the plain loop's bits; penstock plan: also all
        program: file of a custom schedule, a line of instructions such as 0F0 0F1 0B0 0B1 for each rank
        weights: version a micro-batch sees: latest; async_1f1b: stashed, vertical_sync; 1f1b: double_buffered
        weights_first: in a backward, a layer's weight gradient comes before the gradient of its input
        recompute: keep nothing of a forward but what entered: it runs again ahead of its backward; or of
            the layers of some modules, which run again one module at a time: [layer3], [encoder.layer.*]
        prediction: with async_1f1b, forwards run with the weights expected at their backward
        error_feedback: with double_buffered, an update makes up for the delay of the one before it
        codec: how tensors are packed between stages: auto measures and chooses; or the name of a codec
        batch_size: samples in one step
        micro_batches: parts of a batch, which follow each other through the stages; auto: by simulated steps
        extra_in_flight: micro-batches in flight beyond plain 1f1b, for a slow link; auto: up to 2, by measure
        link: speed between ranks, for the planner, for example 1Gbit; null: unlimited
        cluster: YAML file of ranks that differ in speed, memory and links; ranks= is as many
        memory: limits for the planner
        replicas: ranks that share the micro-batches of a stage
        seed: decides initial weights, order of samples and random layers
        threads: threads per rank; null: the cores available divided by the ranks
        deterministic: only algorithms that repeat their bits
        device: what computes: cpu; cuda, each rank a GPU or a share of one; auto, cuda where there is one; a
            list, one for each rank: [cpu,cuda:0]
        tf32: on a GPU, products and convolutions of float32 in TF32, which is faster and less exact
    """

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    ranks: Any = 2
    stages: int | None = None
    cuts: list[str] | None = None
    schedule: str = "1f1b"
    program: str | None = None
    weights: str = "latest"
    weights_first: bool = False
    recompute: Any = False
    prediction: bool = False
    error_feedback: bool = False
    codec: str = "auto"
    batch_size: int = 128
    micro_batches: Any = 8
    extra_in_flight: Any = "auto"
    link: Any = None
    cluster: str | None = None
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)
    seed: int = 0
    threads: int | None = None
    deterministic: bool = True
    device: Any = "cpu"
    tf32: bool = False

    searched = tuple[str, ...]()  # no option: those that are to be chosen; until then they have some number

    @property
    def has_links(self) -> bool:
        """True if the rate of a link between ranks is given, so that bytes take time."""
        return self.link is not None or self.cluster is not None

    def __post_init__(self) -> None:
        for name in ("stages", "batch_size", "threads"):
            at_least(1, name, getattr(self, name))
        for name, number in (("ranks", 1), ("micro_batches", min(8, self.batch_size))):
            value = count_or_auto(name, getattr(self, name), least=1)
            setattr(self, name, number if value == AUTO else value)
            self.searched += (name,) * (value == AUTO)
        at_least(0, "seed", self.seed)
        self.extra_in_flight = count_or_auto("extra_in_flight", self.extra_in_flight)
        if isinstance(self.recompute, list):
            self.recompute = [str(path) if type(path) is int else path for path in self.recompute]
        paths = self.recompute if isinstance(self.recompute, list) else []
        named = paths and all(isinstance(path, str) and path for path in paths)
        if not named and not isinstance(self.recompute, bool):
            raise ConfigError(
                f"recompute={self.recompute} must be true, false or a list of modules, as [layer3,layer4.*]"
            )
        if self.micro_batches > self.batch_size:
            raise ConfigError(
                f"batch_size={self.batch_size} is too small for micro_batches={self.micro_batches}, each of "
                f"which has a sample at least; lower micro_batches to {self.batch_size}, or raise batch_size"
            )
        for device in self.devices:
            if device != AUTO and not is_device(device):
                raise ConfigError(f"device={device} is not known; known are cpu, cuda, cuda:N and auto")
        if self.program is not None and self.schedule != "custom":
            raise ConfigError(
                f"program={self.program} is for schedule=custom, found schedule={self.schedule}; drop either"
            )

    @property
    def devices(self) -> list[Any]:
        """Devices by rank; one is for all."""
        return self.device if isinstance(self.device, list) else [self.device]

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
        detect_anomaly: stop at the first NaN output, or NaN or infinite gradient or loss, and name its layer
        nan: what a loss that is no number does: stop, with exit code 3; warn
        epochs: how often every training sample is seen
        max_steps: stop after this many steps; null: no limit
        deadline: seconds that any wait between ranks may take before the run ends
        max_restarts: how often ranks that were killed, lost or hang are started again from a checkpoint
        min_ranks: fewest ranks to go on with where one is lost again at once; null: all
        cache: a cache of samples that the training jobs of this machine share: cache=shared; none
        checkpoint: when the run writes one, and how many it keeps
        digest: digests of weights, gradients and optimizer state on record, for penstock diff
        audit: steps that are repeated while a run goes on
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
    digest: DigestConfig = field(default_factory=DigestConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
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
        for name, reason in {"minutes": "depends on the clock", "best": "depends on a test"}.items():
            if self.streams and (value := getattr(self.checkpoint, name)) is not None:
                raise ConfigError(
                    "a checkpoint drains what is in flight without a flush, so its step decides bits, and "
                    f"checkpoint.{name}={value} {reason}; give checkpoint.every="
                )
        one_of(("stop", "warn"), "nan", self.nan)
        for name in self.loggers:
            one_of(LOGGERS, "logger", name)
        self._check_update()
        if "ranks" in self.searched and (self.min_ranks is not None or self.replicas.threads):
            option = "replicas.threads=true" if self.replicas.threads else f"min_ranks={self.min_ranks}"
            raise ConfigError(f"{option} is for a number of ranks, found ranks=auto; give the number")
        self._check_restarts()
        self._check_replicas()
        self._check_audit()

    @property
    def loggers(self) -> tuple[str, ...]:
        """The names in ``logger=``."""
        names = [] if self.logger is None else self.logger
        return tuple(names if isinstance(names, list) else [names])

    @property
    def streams(self) -> bool:
        """True if micro-batches are in flight between steps, so that a checkpoint drains them."""
        return self.schedule == "async_1f1b" or self.weights == "double_buffered"

    def _check_audit(self) -> None:
        if self.audit.every is None:
            return
        rule = f"audit.every={self.audit.every} repeats a step after a checkpoint and compares digests"
        if self.digest.every is None:
            raise ConfigError(f"{rule}, found none; add digest.every=10")
        if self.checkpoint.every is None and self.checkpoint.minutes is None:
            raise ConfigError(f"{rule}, found no checkpoints; add checkpoint.every=100")
        if self.replicas.several and not self.replicas.exact:
            raise ConfigError(f"{rule}, which replicas sum in another order; add replicas.exact=true")
        if isinstance(self.device, list):
            raise ConfigError(f"{rule} on one device, found device={shown(self.device)}; leave it out")

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
        fixed += [
            f"{name}={value}" for name in ("plan", "program", "cluster") if (value := getattr(self, name))
        ]
        if fixed:  # it does not let ranks become fewer
            raise ConfigError(f"min_ranks={self.min_ranks} does not go with {fixed[0]}; drop either")

    def _check_update(self) -> None:
        if self.autocast is not None:
            one_of(CASTS, "autocast", self.autocast)
        scale = self.loss_scale
        number = isinstance(scale, int | float) and not isinstance(scale, bool) and 0 < scale < math.inf
        if scale not in (None, "dynamic") and not number:
            raise ConfigError(f"loss_scale={scale} must be dynamic or a number above 0; drop it for none")
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
        profile: profile.json of an earlier plan: nothing is measured, model and data are not needed
    """

    graph: bool = False
    profile: str | None = None
    memory: PlanningMemoryConfig = field(  # pyright: ignore[reportIncompatibleVariableOverride] more of it
        default_factory=PlanningMemoryConfig
    )
