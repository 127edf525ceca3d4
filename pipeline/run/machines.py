"""A run on several machines: what machine 0 tells the others, and how each runs its ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...compression.errors import ConfigError
from ...conf.machines import MachinesConfig
from ...conf.schema import TrainConfig
from ...stages.planner.plan import Plan
from ..ranks import launch
from ..ranks.failure import Failure, read_failures
from ..ranks.follower import follow
from ..ranks.meeting import Address, MeetingStore
from ..ranks.network_device import device_with
from ..ranks.nodes import Lead, Node
from ..ranks.processes import Ends
from . import console
from .run_folder import RunFolder, config_of

_SHARED_SECONDS = 5.0
"""How long a file may take until another machine sees it."""


@contextlib.contextmanager
def leading(config: TrainConfig, typed: Sequence[str]) -> Iterator[Lead | None]:
    """Be machine 0 for the block; the others are told how it ended. None where there is one machine.

    Raises: ConfigError: there is no secret, or ``master`` cannot be listened at."""
    if config.nodes == 1:
        yield None
        return
    lead = Lead(_node(config, typed), console.warn)
    try:
        yield lead
    except KeyboardInterrupt as stop:
        lead.close(f"node 0 was stopped by {str(stop) or 'Ctrl-C'}, and the run with it", patience=1)
        raise
    except BaseException as error:
        lead.close(str(error) or type(error).__name__)
        raise
    lead.close()


def run_led(module: str, config: TrainConfig, plan: Plan, folder: RunFolder, lead: Lead) -> None:
    """Run all ranks once: ``python -m module`` with the folder that tells what to do, and the run's."""
    with folder.private() as told:
        told.tell(config, plan)

        def here(job: Mapping[str, Any], ranks: Sequence[int], called_off: Callable[[], bool]) -> Any:
            return _run(module, told, folder, job, ranks, called_off, at=lead.address, own=lead.address[0])

        job = {
            "module": module,
            "folder": str(folder.path.absolute()),
            "config": told.config.read_text(),
            "plan": plan.to_json(),
            "record": folder.config.read_text(),
            "restarts": config.max_restarts,
        }
        lead.run(job, here, stages_of_rank=plan.stages_of_rank, errors=told.errors)


def follow_node_0(config: MachinesConfig, typed: Sequence[str]) -> None:
    """Run this machine's ranks whenever machine 0 says so, until the run has ended.

    Raises: PenstockError: why it failed, as machine 0 tells it."""
    follow(_node(config, typed), _run_job, console.warn)


def _run_job(
    store: MeetingStore, job: Mapping[str, Any], ranks: Sequence[int], called_off: Callable[[], bool]
) -> tuple[Ends, list[Failure]]:
    folder = RunFolder(path=Path(job["folder"]))
    config, plan = config_of(job["config"]), Plan.of_json(job["plan"], "the plan of node 0")
    if config.checkpoint.every or config.checkpoint.minutes:
        _check_shared(folder, job["record"])
    with folder.private() as told:
        told.tell(config, plan)
        own = store.own_address
        return _run(job["module"], told, folder, job, ranks, called_off, at=store.address, own=own)


def _run(
    module: str,
    told: RunFolder,
    folder: RunFolder,
    job: Mapping[str, Any],
    ranks: Sequence[int],
    called_off: Callable[[], bool],
    *,
    at: Address,
    own: str,
) -> tuple[Ends, list[Failure]]:
    """Run this machine's ranks; ``at``: where all meet; ``own``: this machine's address for the others."""
    ends = launch.run_ranks(
        module,
        [str(told.path), str(folder.path)],
        ranks,
        of=job["ranks"],
        meeting=launch.AT + json.dumps([*at, f"ranks/{job['generation']}/"]),
        device=os.environ.get("GLOO_SOCKET_IFNAME") or device_with(own),
        called_off=called_off,
    )
    kept = [
        dataclasses.replace(one, sentence=one.sentence.replace(str(told.errors), str(folder.errors)))
        for one in read_failures(told.errors)
    ]
    return ends, kept


def _check_shared(folder: RunFolder, record: str) -> None:
    """Refuse checkpoints into a folder that is not the one of machine 0."""
    until = time.monotonic() + _SHARED_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if folder.config.read_text() == record:
                return
        if time.monotonic() > until:
            raise ConfigError(
                f"all ranks write a checkpoint into one folder, and {folder.path} of node 0 is not here; put "
                "hydra.run.dir on a file system that all nodes share"
            )
        time.sleep(0.2)


def _node(config: MachinesConfig, typed: Sequence[str]) -> Node:
    """This machine, and what it says of itself: versions, and options but those of one machine alone."""
    options = [option.lstrip("+").partition("=") for option in typed]
    said = {key: value for key, _, value in options if not _is_own(key)}
    said |= {"nodes": str(config.nodes), "penstock": __version__, "torch": str(torch.__version__)}
    return Node(
        number=config.node,
        nodes=config.nodes,
        master=config.meeting,
        secret=launch.secret(),
        patience=config.join_deadline,
        said=said,
    )


def _is_own(key: str) -> bool:
    """Whether an option is one that machines may type each for itself."""
    return key in ("node", "master", "join_deadline", "resume") or key.startswith("hydra.")
