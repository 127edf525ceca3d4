"""READ FIRST: how a run goes, from the options to the trained model.

``train`` runs in the process that was started: it refuses what cannot work, makes the plan, starts the ranks.
``train_rank`` then runs once in every rank (in that same process when there is only one):

    train:       options -> samples -> model -> trace -> measure -> partition -> Plan
    train_rank:  options, Plan -> samples -> model -> Pipeline -> step after step -> the run folder

Below this file nothing knows of a configuration: functions take values."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compression.choose import check_name
from ..compression.errors import ConfigError, PlanError, ScheduleError
from ..conf.schema import PlanConfig, TrainConfig
from ..stages.graph import trace
from ..stages.layers import casting
from ..stages.measure import Profile, measure
from ..stages.partition import partition
from ..stages.plan import Plan
from ..stages.rules import STREAM, check_versions
from . import build, console, group
from .compare import ALL, SYNCHRONOUS, compare
from .launch import check_ranks, cores, init, run_rank, start_ranks, threads_per_rank
from .metrics import Metrics, summarise
from .pipeline import Pipeline
from .report import Report
from .run_folder import RunFolder, save_json, save_model
from .samples.samples import Samples
from .schedules import schedule_named
from .step_files import save_comparison, save_step

# What a plan decides, by the names of options.
TAKEN = ("schedule", "micro_batches", "extra_in_flight", "codec", "weights", "weights_first", "prediction")


def train(config: TrainConfig, folder: RunFolder, typed: Sequence[str] = ()) -> None:
    """Train as ``config`` says and leave everything in ``folder``; print what a person sees.

    Args:   typed: the options as typed, so that one that contradicts ``plan=`` is refused and not ignored.
    Raises: PenstockError: something that was asked for cannot be had, or a rank failed.
    """
    folder.claim()
    given = take_over(config, typed) if config.plan else None
    check_ranks(config.ranks)
    samples = prepare(config)
    plan = given or decide(config, samples, autocast=build.autocast(config.autocast))
    config.stages = plan.num_stages
    rehearse(config, plan, samples)
    folder.save(config, plan)
    console.begin(plan, folder.path)
    if plan.num_ranks == 1:
        train_rank(folder)
    else:
        start_ranks(__name__, [str(folder.path)], errors=folder.errors, stages_of_rank=plan.stages_of_rank)
    console.close(folder.read_summary(), files=[folder.plan_picture, folder.timeline, folder.trace])


def rehearse(config: TrainConfig, plan: Plan, samples: Samples) -> None:
    """Put the whole pipeline together in this process, to refuse now what a rank would refuse."""
    check_batches(config, plan, samples)
    try:
        assemble(config, plan, samples)
    except (PlanError, ScheduleError) as error:
        given = next((name for name in ("plan", "program") if getattr(config, name)), None)
        source = f"{given}={getattr(config, given)}: " if given else ""
        raise type(error)(f"{source}{error}") from error


def check_batches(config: TrainConfig, plan: Plan, samples: Samples) -> None:
    """Refuse batches, the last of an epoch too, that are too small for two versions of the weights.

    Raises: ConfigError: one has fewer samples than there are stages.
    """
    if plan.weights != "double_buffered":
        return
    found, smallest = f"batch_size={config.batch_size}", config.batch_size
    rest = samples.num_samples("train") % config.batch_size
    if rest and not config.data.get("drop_last", True):
        found, smallest = f"data.drop_last=false, whose last batch has {rest}", rest
    if smallest < plan.num_stages:
        raise ConfigError(
            "weights=double_buffered needs at least as many samples in a batch as there are stages, "
            f"{plan.num_stages}, found {found}; choose another batch_size"
        )


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
    save_comparison(folder, found, title=f"{_target(config)}, simulated from measured layers: {job}")
    return found.chosen.plan


def assemble(config: TrainConfig, plan: Plan, samples: Samples) -> Pipeline:
    """Return the pipeline of this process: in a group of ranks its own stages, else all of them.

    Raises: PenstockError: the model, the plan, the optimizer and the schedule do not go together.
    """
    return Pipeline(
        # No other reference is kept: the pipeline drops the layers of other ranks.
        build.model(config.model, describe=samples.describe, seed=config.seed),
        plan,
        loss=loss,
        optimizer=build.optimizer(config.optimizer),
        scheduler=build.scheduler(config.scheduler, num_steps=count_updates(config, samples)),
        clip=config.clip.norm,
        clip_scope=config.clip.scope,
        scaler=build.scaler(config.loss_scale),
        autocast=build.autocast(config.autocast),
        seed=config.seed,
        deadline=config.deadline,
    )


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


def example_inputs(config: PlanConfig, samples: Samples) -> tuple[Tensor]:
    """Return the first micro-batch of the first training batch."""
    inputs, _ = next(training_batches(config, samples, epoch=0))
    return (inputs.tensor_split(min(config.micro_batches, len(inputs)))[0].clone(),)


def training_batches(config: PlanConfig, samples: Samples, *, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the batches of one epoch, the same ones on every rank."""
    return samples.batches(
        "train",
        batch_size=config.batch_size,
        epoch=epoch,
        seed=config.seed,
        drop_last=config.data.get("drop_last", True),
    )


def count_steps(config: TrainConfig, samples: Samples) -> int:
    """Return how many steps the run takes."""
    an_epoch = samples.num_batches(
        "train", batch_size=config.batch_size, drop_last=config.data.get("drop_last", True)
    )
    num_steps = config.epochs * an_epoch
    return num_steps if config.max_steps is None else min(num_steps, config.max_steps)


def count_updates(config: TrainConfig, samples: Samples) -> int:
    """Return how often the run updates the weights: every micro-batch of ``async_1f1b`` does."""
    number = count_steps(config, samples)
    return number * min(config.micro_batches, config.batch_size) if config.schedule == STREAM else number


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of classes (batch, classes) or of characters (batch, length, classes)."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def train_rank(folder: RunFolder) -> None:
    """Train this rank's stages; rank 0 also tells and writes what happens."""
    config, plan = folder.read_config(), Plan.load(folder.plan)
    init(deadline=config.deadline)
    samples = prepare(config)
    pipe, num_steps = assemble(config, plan, samples), count_steps(config, samples)
    first = group.rank() == 0
    with (
        Metrics(folder.metrics if first else None, num_stages=plan.num_stages) as metrics,
        console.Training(num_steps, shown=first) as progress,
    ):
        test = run_epochs(pipe, plan, config, samples, see=[metrics.add, progress.step], note=progress.note)
    weights, spans, flows = pipe.state_dict()["model"], pipe.timeline(), pipe.flows()
    pipe.close()
    if first:
        save_model(folder.model, weights)
        save_step(folder, spans, title=_title(config, plan, step=num_steps - 1))
        sizes = {name: weight.numel() for name, weight in weights.items()}
        facts = {"ranks": plan.num_ranks, "threads": config.threads, "cores": cores(), "codec": plan.codec}
        facts |= {"flows": flows, "turns": [dataclasses.asdict(turn) for turn in pipe.policy.turns]}
        save_json(folder.summary, summarise(metrics.totals, plan, sizes=sizes, test=test, **facts))


def run_epochs(
    pipe: Pipeline,
    plan: Plan,
    config: TrainConfig,
    samples: Samples,
    *,
    see: Sequence[Callable[[Report], None]],
    note: Callable[[str], None],
) -> dict[str, float]:
    """Take every step and test after each epoch; return the last test's results."""
    left = count_steps(config, samples)
    test: dict[str, float] = {}
    for epoch in range(config.epochs):
        for inputs, targets in islice(training_batches(config, samples, epoch=epoch), left):
            report = pipe.step(inputs, targets)
            left -= 1
            for one in see:
                one(report)
        test = evaluate(pipe, plan, config, samples)
        result = f"test accuracy {test['accuracy']:.2%}, test loss {test['loss']:.4f}"
        note(f"epoch {epoch + 1}/{config.epochs}: {result}")
        if left == 0:
            break
    return test


def evaluate(pipe: Pipeline, plan: Plan, config: TrainConfig, samples: Samples) -> dict[str, float]:
    """Return the accuracy and the mean loss over the test split, on every rank."""
    right = total = 0
    lost = 0.0
    for inputs, targets in samples.batches("test", batch_size=config.batch_size):
        outputs = pipe.evaluate(inputs)
        if outputs is not None:
            right += int((outputs.argmax(-1) == targets).sum())
            with casting(build.autocast(config.autocast)):
                lost += float(loss(outputs, targets)) * targets.numel()
            total += targets.numel()
    last = plan.ranks[-1]
    right, lost, total = (group.share(number, last) for number in (right, lost, total))
    return {"accuracy": right / total, "loss": lost / total}


def _title(config: TrainConfig, plan: Plan, *, step: int) -> str:
    versions = (
        f" weights={plan.weights}{' prediction=true' if plan.prediction else ''}" if plan.streams else ""
    )
    job = f"schedule={plan.schedule}{versions} micro_batches={plan.micro_batches} stages={plan.num_stages}"
    return f"{_target(config)}, step {step}: {job} ranks={plan.num_ranks}"


def _target(config: PlanConfig) -> str:
    return config.model.get("name") or config.model["_target_"].rpartition(".")[2]


if __name__ == "__main__":
    run_folder = RunFolder(path=Path(sys.argv[1]))
    run_rank(lambda: train_rank(run_folder), run_folder.errors)
