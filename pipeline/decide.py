"""From a person's options to the plan of a run, or back from a plan that was made before.

``penstock plan`` stops behind this file and ``penstock train`` goes on from it, so both decide alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..compression.choose import check_name
from ..compression.errors import ConfigError
from ..conf.schema import PlanConfig, TrainConfig
from ..stages.graph import trace
from ..stages.measure import Profile, measure
from ..stages.partition import partition
from ..stages.plan import Plan
from ..stages.rules import check_versions
from . import build, console
from .compare import ALL, SYNCHRONOUS, compare
from .course import example_inputs
from .launch import threads_per_rank
from .run_folder import RunFolder
from .samples.samples import Samples
from .schedules import schedule_named
from .step_files import save_comparison

# What a plan decides, by the names of options.
TAKEN = ("schedule", "micro_batches", "extra_in_flight", "codec", "weights", "weights_first", "prediction")


def prepare(config: PlanConfig) -> Samples:
    """Set up this process, fill in the threads, and return the data.

    Raises: PenstockError: the schedule or the codec is not known, or the data cannot be had.
    """
    if config.schedule == ALL:
        raise ConfigError(
            "schedule=all compares the schedules, which penstock plan does; run penstock plan schedule=all, "
            "look, and train with plan=PATH of its plan.json"
        )
    schedule_named(config.schedule)
    check_name(config.codec)
    check_versions(
        schedule=config.schedule,
        weights=config.weights,
        prediction=config.prediction,
        num_stages=config.num_stages,
        micro_batches=config.micro_batches,
        extra_in_flight=config.extra_in_flight,
    )
    config.threads = config.threads or threads_per_rank(config.ranks)
    torch.set_num_threads(config.threads)
    # The same switch as use_deterministic_algorithms, which also loads the compiler: 1.6 s in every process.
    torch.set_deterministic_debug_mode("error" if config.deterministic else "default")
    # Deterministic mode fills every torch.empty, 19 ms for 32 MB, and no bit depends on it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return build.samples(config.data)


def decide(config: PlanConfig, samples: Samples, *, autocast: torch.dtype | None = None) -> Plan:
    """Return the plan for ``config``: trace and measure the model on one micro-batch, then choose the cuts.

    Args:   autocast: the dtype that training will cast to.
    Raises: PlanError: the model cannot be traced, or cut as asked.
    """
    program = build.program(config.program)
    return partition(
        look(config, samples, autocast=autocast),
        schedule=config.schedule,
        weights=config.weights,
        prediction=config.prediction,
        program=program,
        **wishes(config),
    )


def look(config: PlanConfig, samples: Samples, *, autocast: torch.dtype | None = None) -> Profile:
    """Trace and measure the model on one micro-batch.

    Raises: PlanError: the model cannot be traced.
    """
    model = build.model(config.model, describe=samples.describe, seed=config.seed)
    example = example_inputs(config, samples)
    return measure(trace(model, example, autocast=autocast), example)


def wishes(config: PlanConfig) -> dict[str, Any]:
    """Return what ``partition`` is asked for beside the schedule and its weights."""
    return {
        "stages": config.stages,
        "cuts": config.cuts,
        "ranks": config.ranks,
        "micro_batches": config.micro_batches,
        "extra_in_flight": config.extra_in_flight,
        "codec": config.codec,
        "link": config.link,
        "memory": config.memory.device,
        "tier": config.memory.tier,
        "weights_tier": config.memory.weights,
        "weights_first": config.weights_first,
    }


def compare_schedules(config: PlanConfig, folder: RunFolder) -> Plan:
    """Plan and simulate every schedule for ``config``, show them, and return the plan of the chosen one.

    Raises: PenstockError: nothing can be planned as asked, or nothing fits.
    """
    config.schedule = SYNCHRONOUS[0]  # until one is chosen
    found = compare(look(config, prepare(config)), **wishes(config))
    config.schedule = found.chosen.plan.schedule
    console.compared(found)
    job = f"micro_batches={config.micro_batches} stages={found.chosen.plan.num_stages} ranks={config.ranks}"
    save_comparison(folder, found, title=f"{model_name(config)}, simulated from measured layers: {job}")
    return found.chosen.plan


def take_over(config: TrainConfig, typed: Sequence[str]) -> Plan:
    """Return the plan that ``plan=`` names, its decisions written into ``config``.

    Raises: PlanError: there is no such plan. ConfigError: an option was typed that contradicts it.
    """
    plan = Plan.load(str(config.plan))
    keys = [option.partition("=")[0].lstrip("+") for option in typed]
    for key in ("link", "memory.device"):
        if key in keys:
            raise ConfigError(f"{key}= is for making a plan, and plan={config.plan} is one; drop either")
    decided: dict[str, Any] = {"ranks": plan.num_ranks, "stages": plan.num_stages}
    decided |= {key: getattr(plan, key) for key in TAKEN}
    for key, value in (decided | {"memory.tier": plan.tier, "memory.weights": plan.weights_tier}).items():
        place, name = (config.memory, key[7:]) if key.startswith("memory.") else (config, key)
        if key in keys and getattr(place, name) != value:
            asked = f"{key}={getattr(place, name)}"
            raise ConfigError(f"{asked} contradicts plan={config.plan} with {key}={value}; drop either")
        setattr(place, name, value)
    config.__post_init__()  # its rules hold for what the plan decided, too
    return plan


def model_name(config: PlanConfig) -> str:
    """Return what a title calls the model."""
    return config.model.get("name") or config.model["_target_"].rpartition(".")[2]
