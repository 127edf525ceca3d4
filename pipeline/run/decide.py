"""From a person's options to the plan of a run, or back from a plan that was made before.

``penstock plan`` stops behind this file and ``penstock train`` goes on from it, so both decide alike."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ...compression.errors import PlanError
from ...compression.names import AUTO
from ...conf.schema import PlanConfig
from ...stages.memory.disk import DiskOptions, disk_rate
from ...stages.planner.measure import measure
from ...stages.planner.network_profile import Profile
from ...stages.planner.plan import Plan
from ...stages.tracing.layer_graph import LayerGraph
from ...stages.tracing.tracer import trace
from ...stages.units import is_zero, share_of
from ..planner.choose import bytes_of_share
from ..planner.partition import partition
from ..ranks.launch import threads_per_rank
from ..samples.samples import Samples
from ..weights.optimizers import state_per_byte
from . import build, console, exactness
from .bare import is_bare
from .early import program
from .exactness import place
from .run_folder import RunFolder
from .run_length import example_inputs
from .schedule_comparison import SYNCHRONOUS, compare
from .step_files import save_comparison

OF_A_PLAN = "stages cuts ranks micro_batches extra_in_flight codec link weights_first recompute".split()
"""What ``partition`` is asked for under the option's own name."""


def prepare(config: PlanConfig) -> Samples:
    """Set up this process, fill in the threads, and return the data.

    Raises: PenstockError: the data or the device cannot be had.
    """
    config.threads = config.threads or threads_per_rank(config.ranks)
    torch.set_num_threads(config.threads)
    exactness.begin(config)
    return build.samples(config.data, batch_size=config.batch_size)


def decide(
    config: PlanConfig,
    samples: Samples,
    *,
    model: nn.Module | None = None,
    autocast: torch.dtype | None = None,
    profile: Profile | None = None,
) -> Plan:
    """Return the plan for ``config``: trace and measure the model on one micro-batch, then choose the cuts.

    Args:   model: what the configuration names, where it was made already.
            autocast: the dtype that training will cast to.
            profile: what was measured, where it was already.
    Raises: PlanError: the model cannot be traced, or cut as asked.
    """
    plan = partition(
        profile or look(config, samples, model=model, autocast=autocast),
        schedule=config.schedule,
        weights=config.weights,
        prediction=config.prediction,
        program=program(config.program),
        **partition_options(config),
    )
    if config.replicas.idle and plan.num_ranks < config.ranks:
        console.warn(
            f"ranks={plan.num_ranks} of {config.ranks}: no way to give more of them work has a shorter step, "
            "simulated with the exchange of gradients"
        )
    return plan


def look(
    config: PlanConfig,
    samples: Samples,
    *,
    model: nn.Module | None = None,
    autocast: torch.dtype | None = None,
) -> Profile:
    """Return what was measured of the model on one micro-batch; arguments and errors are those of
    ``record``."""
    return record(config, samples, model=model, autocast=autocast)[1]


def record(
    config: PlanConfig,
    samples: Samples,
    *,
    model: nn.Module | None = None,
    autocast: torch.dtype | None = None,
) -> tuple[LayerGraph, Profile]:
    """Trace and measure the model on one micro-batch.

    Args:   model: what the configuration names, where it was made already.
    Raises: PlanError: the model cannot be traced.
    """
    model = model or build.model(config.model, describe=samples.describe, seed=config.seed)
    example, device = example_inputs(config, samples), place(config).torch  # whose seconds count
    if is_bare(config.model):
        example = tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, example)
    else:
        model.to(device)
    try:
        graph = trace(model, example, autocast=autocast, leaves=config.model.get("leaves") or ())
    except PlanError as error:
        if len(tree_leaves(example)[0]) > 1:
            raise
        asked = f"batch_size={config.batch_size} micro_batches={config.micro_batches}"
        raise PlanError(
            f"{asked} make micro-batches of one sample, too few for a batch norm: {error}"
        ) from error
    return graph, measure(graph, example)


def partition_options(config: PlanConfig) -> dict[str, Any]:
    """Return what ``partition`` is asked for beside the schedule and its weights."""
    memory = config.memory
    return {
        **{name: getattr(config, name) for name in OF_A_PLAN},
        "replicas": config.replicas.count,
        "exact": config.replicas.exact,
        "sharded": config.replicas.sharded,
        "shares": config.replicas.shares if isinstance(config.replicas.shares, list) else (),
        "idle": config.replicas.idle,
        "optimizer_state": state_per_byte(build.optimizer(config.optimizer)) if config.optimizer else None,
        "memory": memory.device,
        "tier": memory.tier,
        "weights_tier": memory.weights,
        "parameters_tier": memory.parameters,
        "disk_rate": _disk_rate(config),
    }


def _disk_rate(config: PlanConfig) -> float | None:
    """Bytes per second of the disk, where somebody must choose whether to use it; 0: it may not be used."""
    memory = config.memory
    if memory.disk is not None and is_zero(memory.disk):
        return 0.0
    if memory.device is None or AUTO not in (memory.tier, memory.parameters):
        return None
    return disk_rate(DiskOptions(path=memory.path or Path.cwd()))


def disk_options(config: PlanConfig, folder: RunFolder | None) -> DiskOptions:
    """Return what the tier disk of a rank may use: the run folder, where this machine has it, or ``path``."""
    memory = config.memory
    path = memory.path or (folder.path if folder is not None and folder.path.is_dir() else None)
    return DiskOptions(path=path, budget=memory.disk)


def compare_schedules(config: PlanConfig, profile: Profile, folder: RunFolder) -> Plan:
    """Plan and simulate every schedule for ``config``, show them, and return the plan of the chosen one.

    Args:   profile: what was measured of the model.

    Raises: PenstockError: nothing can be planned as asked, or nothing fits.
    """
    config.schedule = SYNCHRONOUS[0]  # until one is chosen
    options = partition_options(config)
    if (share := share_of(options["memory"])) is not None:  # one budget for all of them
        options["memory"] = bytes_of_share(share, functools.partial(partition, profile, **options))
    found = compare(profile, **options)
    config.schedule = found.chosen.plan.schedule
    console.compared(found)
    job = f"micro_batches={config.micro_batches} stages={found.chosen.plan.num_stages} ranks={config.ranks}"
    save_comparison(folder, found, title=f"{model_name(config)}, simulated from measured layers: {job}")
    return found.chosen.plan


def model_name(config: PlanConfig) -> str:
    """Return what a title calls the model."""
    return config.model.get("name") or config.model["_target_"].rpartition(".")[2]
