"""A run on ranks that torchrun started: each reads its own command line, and rank 0 alone plans.

    rank 0   read options . meet . compare . trace, measure, plan . publish . join
    others   read options . meet . compare . wait ................. follow .. join

What travels is JSON of the process group: a plan, numbers, and the name of a folder. Nothing that a rank
receives names what it imports or runs."""

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...compression.errors import ConfigError, Disagreement
from ...conf.schema import AGAIN, TrainConfig
from ...stages.plan.plan import Plan
from ..distributed.launcher import init
from ..distributed.process_group import World
from ..runtime.agreement import Agreement
from ..runtime.fingerprints import Fact
from .build import check_targets
from .resume import flat
from .run_folder import RunFolder

_AT = "the plan of rank 0"
_SHARED_SECONDS = 5.0  # until another machine sees a file


def meet(config: TrainConfig) -> World:
    """Join the other ranks, and compare what was typed."""
    world = init(deadline=config.deadline)
    remedy = "type the same line on every machine, but for --node-rank"
    options = [Fact(f"{key}=", str(value), remedy) for key, value in flat(dataclasses.asdict(config))]
    Agreement(world).agree("its options", lambda: options)
    return world


@contextlib.contextmanager
def planning(world: World | None) -> Iterator[None]:
    """The block in which rank 0 makes the plan: the others wait as long as it lives, and know if it fails."""
    if world is None:
        yield
        return
    try:
        with world.notices.busy():
            yield
    except Exception as error:
        Agreement(world).refuse(_AT, error)
        raise


def publish(world: World, config: TrainConfig, plan: Plan, folder: RunFolder) -> None:
    """Give the others what rank 0 decided."""
    message = {"plan": plan.to_json(), "threads": config.threads, "resumes": config.resume is not None}
    message |= {"folder": folder.path.name, "record": _digest(folder)}
    Agreement(world).exchange(_AT, message)
    with Agreement(world).all_or_none("its run folder"):
        pass


def follow(config: TrainConfig, folder: RunFolder) -> tuple[Plan, RunFolder, World]:
    """Meet the others as a rank other than 0, and write the decisions of rank 0 into ``config``.

    Args:    folder: as this rank would name it; the last part of its path becomes that of rank 0.
    Returns: the plan of rank 0, the run folder, and the ranks."""
    check_targets(config)
    world = meet(config)
    world.notices.wait_for(0, deadline=config.deadline)
    message = Agreement(world).exchange(_AT, None)[0]
    with Agreement(world).all_or_none("its run folder"):
        plan, folder = _take(config, folder, message)
    return plan, folder, world


def _take(config: TrainConfig, folder: RunFolder, message: Any) -> tuple[Plan, RunFolder]:
    kinds = {"plan": dict, "threads": int, "resumes": bool, "folder": str, "record": str}
    right = isinstance(message, Mapping) and all(type(message.get(key)) is kinds[key] for key in kinds)
    if not right or message["threads"] < 1:
        raise Disagreement("what rank 0 sent is no plan of a run; install the same build on every rank")
    plan = Plan.of_json(message["plan"], _AT)
    name = message["folder"]
    if name not in ("", "..") and Path(name).name == name:
        folder = RunFolder(path=folder.path.parent / name)
    config.stages, config.threads = plan.num_stages, message["threads"]
    if not message["resumes"]:
        config.resume = None
    elif config.resume == AGAIN:
        config.resume = str(folder.path.absolute())
    if config.checkpoint.every or config.checkpoint.minutes or config.checkpoint.best:
        _check_shared(folder, message["record"])
    return plan, folder


def _check_shared(folder: RunFolder, record: str) -> None:
    until = time.monotonic() + _SHARED_SECONDS
    while _digest(folder) != record:
        if time.monotonic() > until:
            raise ConfigError(
                f"all ranks write a checkpoint into one folder, and {folder.path} of rank 0 is not here; put "
                "hydra.run.dir on a file system that all machines share"
            )
        time.sleep(0.2)


def _digest(folder: RunFolder) -> str:
    with contextlib.suppress(OSError):
        return hashlib.blake2b(folder.config.read_bytes(), digest_size=16).hexdigest()
    return ""
