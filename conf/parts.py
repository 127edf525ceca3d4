"""Options that belong together and are typed with a point, as ``memory.tier=`` and ``checkpoint.every=``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..compression.errors import ConfigError
from ..compression.names import AUTO


def shown(names: list[str]) -> str:
    """Return the list as it is typed on the command line."""
    return f"[{','.join(names)}]"


def one_of(known: Sequence[str], name: str, value: str) -> None:
    """Refuse a name that is not known."""
    if value not in known:
        raise ConfigError(f"{name}={value} is not known; known are {', '.join(known)}")


def count_or_auto(name: str, value: Any) -> None:
    """Refuse what is neither "auto" nor a count from 0."""
    if value != "auto" and (type(value) is not int or value < 0):
        raise ConfigError(f"{name}={value} must be auto, or 0 or more")


def at_least(least: int, name: str, value: int | None) -> None:
    """Refuse a count below its least; None is no count."""
    if value is not None and value < least:
        raise ConfigError(f"{name}={value} must be {least} or more")


EVEN, MEASURED = SHARES = ("even", "measured")  # of replicas, beside weights


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
            count_or_auto(f"memory.{name}", getattr(self, name))


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
            raise ConfigError(
                "cache.share= is for the broker of this machine, found with cache.backend=; leave one out"
            )
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
class ReplicasConfig:
    """Ranks that share the micro-batches of a stage.

    Attributes:
        count: ranks of every stage; of each by a list such as [2,1]; ranks= is their sum; auto: the fastest
        exact: they add gradients micro-batch by micro-batch, for the bits of one rank; takes memory and bytes
        sharded: each updates some parameters for all, and keeps the optimizer's state of these only;
            always so with memory.parameters=
        owner: which one updates a parameter then: spread, by bytes; or first, all of them
        shrink: a replica that is lost is done without: the run goes on from its last checkpoint
        shares: even; measured, by speed, as it is from step to step; or weights of all ranks: [3,1]
        threads: in training all ranks are threads of one process
        idle: with count=auto, ranks that would not shorten the simulated step are left out
    """

    count: Any = 1
    exact: bool = False
    sharded: bool = False
    owner: str = "spread"
    shrink: bool = False
    shares: Any = "even"
    threads: bool = False
    idle: bool = False

    def __post_init__(self) -> None:
        weights = isinstance(self.shares, list) and self.shares != []
        if not (self.shares in SHARES or (weights and all(type(n) is int and n >= 0 for n in self.shares))):
            raise ConfigError(
                f"replicas.shares={self.shares} must be {', '.join(SHARES)}, or whole numbers from 0, one "
                "for each rank, as [3,1]"
            )

    @property
    def auto(self) -> bool:
        """True if the planner chooses them."""
        return self.count == AUTO

    @property
    def several(self) -> bool:
        """True if a stage may have more than one."""
        return self.count != 1

    def num_stages(self, ranks: int) -> int:
        """Return the least number of stages on so many ranks."""
        if self.auto:
            return 1
        return len(self.count) if isinstance(self.count, list) else max(1, ranks // self.count)

    def of_stages(self, num_stages: int) -> list[int]:
        """Return the least number that each stage has."""
        if self.auto:
            return [1] * num_stages
        return list(self.count) if isinstance(self.count, list) else [self.count] * num_stages
