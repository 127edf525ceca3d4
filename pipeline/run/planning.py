"""From options to a plan: the length of a run, which every rank counts by itself, and what is measured."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...compression.errors import ConfigError, PlanError
from ...compression.names import AUTO
from ...conf.groups import OURS
from ...conf.schema import MEASURED, PlanConfig, PlanningConfig, TrainConfig
from ...stages.files import save_json, save_picture
from ...stages.memory.disk import DiskOptions, disk_rate
from ...stages.plan.cluster import Cluster, read_cluster
from ...stages.plan.plan import Plan
from ...stages.plan.validation import STREAM
from ...stages.profiling.dependencies import dependencies
from ...stages.profiling.measure import measure
from ...stages.profiling.memory_table import rows, save, table
from ...stages.profiling.network_profile import Profile
from ...stages.torch_private import tree_leaves, tree_map
from ...stages.tracing.capture.call_spec import Example
from ...stages.tracing.meta_model import has_meta
from ...stages.tracing.tracer import LayerGraph, trace
from ...stages.units import is_zero, share_of, show_rate
from ..data.samples import Samples
from ..distributed.launcher import threads_per_rank
from ..optimizer.optimizers import state_per_byte, update_seconds
from ..optimizer.separability import seems_by_element
from ..partition.choose import TooSmall, bytes_of_share
from ..partition.partition import partition
from ..runtime.report import counted
from ..schedules.instruction import Span
from . import build, console, determinism
from .alternatives import alternatives, described
from .determinism import place
from .early import program
from .losses import CROSS_ENTROPY, OF_MODEL
from .run_folder import RunFolder
from .schedule_comparison import Comparison, compare
from .timeline import Panel, draw, perfetto_trace


def training_batches(config: PlanConfig, samples: Samples) -> Iterator[tuple[Any, Tensor]]:
    """Return the batches of the first epoch, the same ones on every rank."""
    options: Any = {"batch_size": config.batch_size, "seed": config.seed}
    options |= {"drop_last": config.data.get("drop_last", True)}
    return samples.batches("train", skips=bool(config.data.get("skip_broken", False)), **options)


def first_batch(config: PlanConfig, samples: Samples) -> tuple[Example, Any]:
    """Return the first micro-batch of the first training batch, as the model takes it, and all targets."""
    inputs, targets = next(training_batches(config, samples))
    model = config.model
    ours = model.get("_target_", "").startswith(OURS) or "num_classes" in model
    num_classes = model.get("num_classes") or samples.describe.num_classes
    _check_labels(config, targets, num_classes if ours else None)
    given = inputs if isinstance(inputs, tuple | dict) else (inputs,)
    number = min(config.micro_batches, len(tree_leaves(given)[0]))
    return tree_map(lambda tensor: tensor.tensor_split(number)[0].clone(), given), targets


def _check_outputs(config: PlanConfig, graph: LayerGraph, targets: Any) -> None:
    """Refuse what the model returns, and labels beyond it, where ``loss=cross_entropy`` cannot take them."""
    if config.loss.get("_target_", CROSS_ENTROPY) != CROSS_ENTROPY:
        return
    traced = graph.train
    if not traced.spec.is_leaf():
        kind = getattr(traced.spec.type, "__name__", "structure")
        raise ConfigError(
            f"loss=cross_entropy takes a tensor, and the model returns a {kind}; where it computes its loss "
            "itself, write loss=model, else loss._target_=my.loss, a function of (outputs, targets)"
        )
    shapes = [shape for node in traced.output.all_input_nodes for shape in node.meta.get("sizes", ())]
    _check_labels(config, targets, shapes[0][-1] if shapes and shapes[0] else None)


def _check_labels(config: PlanConfig, targets: Any, number: int | None) -> None:
    """Refuse labels of the first batch that ``loss=cross_entropy`` cannot take for so many classes."""
    if config.loss.get("_target_", CROSS_ENTROPY) != CROSS_ENTROPY or not isinstance(targets, Tensor):
        return
    if targets.dtype not in (torch.int64, torch.uint8):
        kind = str(targets.dtype).removeprefix("torch.")
        raise ConfigError(
            f"loss=cross_entropy takes labels of int64, found {kind} of shape {tuple(targets.shape)} in the "
            "first batch; convert them (labels.long()), or take another loss="
        )
    if not number:
        return
    if wrong := ((targets >= number) | ((targets < 0) & (targets != -100))).nonzero().tolist():
        sample, *column = wrong[0]
        place = f"sample {sample}{f', column {column[0]},' if column else ''} of the first batch"
        raise ConfigError(
            f"labels of {number} classes are 0 to {number - 1}, or -100 for none, found "
            f"{int(targets[tuple(wrong[0])])} in {place}; check the data, or give the model as many outputs "
            "(model.num_classes=)"
        )


def count_steps(config: TrainConfig, samples: Samples) -> int:
    """Return how many steps the run takes."""
    num_steps = config.epochs * steps_of_an_epoch(config, samples)
    return min(num_steps, config.max_steps or num_steps)


def steps_of_an_epoch(config: PlanConfig, samples: Samples) -> int:
    """Return how many batches an epoch has."""
    drop_last = config.data.get("drop_last", True)
    return samples.num_batches("train", batch_size=config.batch_size, drop_last=drop_last)


def count_updates(config: TrainConfig, samples: Samples) -> int:
    """Return how often the run updates the weights: every micro-batch of ``async_1f1b`` does."""
    number = count_steps(config, samples)
    return number * min(config.micro_batches, config.batch_size) if config.schedule == STREAM else number


def check_batches(config: TrainConfig, plan: Plan, samples: Samples) -> None:
    """Refuse a last batch with fewer samples than stages, too few for two versions of the weights."""
    if not (plan.policy.rule and plan.policy.rule.per_batch) or config.data.get("drop_last", True):
        return
    rest = samples.num_samples("train") % config.batch_size
    if 0 < rest < plan.num_stages:
        raise ConfigError(
            f"weights={plan.weights} needs at least as many samples in a batch as there are stages, "
            f"{plan.num_stages}, found data.drop_last=false, whose last batch has {rest}; choose another "
            f"batch_size than {config.batch_size}"
        )


def save_step(folder: RunFolder, plan: Plan, panel: Panel, spans: Sequence[Span], *, title: str) -> None:
    """Write ``timeline.png``, the simulated step of the plan above the measured one, and
    ``timeline.json``."""
    link = "no time on the links" if plan.link is None else f"links of {show_rate(plan.link)}"
    link = link if plan.cluster is None else f"cluster {plan.cluster}"
    known = "layers and optimizer" if any(stage.update_seconds for stage in plan.stages) else "layers"
    above = f"predicted by the plan: {known} as measured before the run, {link}"
    predicted = dataclasses.replace(panel, title=above)
    draw([predicted, Panel(title="measured", spans=spans)], folder.timeline, title=title)
    save_json(folder.trace, perfetto_trace(spans, title=title))


def prepare(config: PlanConfig) -> Samples:
    """Set up this process, fill in the threads, and return the data."""
    config.threads = config.threads or threads_per_rank(config.ranks)
    set_up(config)
    labelled = config.loss.get("_target_") == OF_MODEL
    return build.samples(config.data, batch_size=config.batch_size, labelled=labelled)


def set_up(config: PlanConfig) -> None:
    """Set up this process."""
    assert config.threads
    torch.set_num_threads(config.threads)
    determinism.begin(config)


def plan_of(config: PlanConfig, profile: Profile, options: dict[str, Any]) -> Plan:
    """Return the plan for ``config``, its ``partition_options`` and what was measured of the model."""
    try:
        if config.schedule == AUTO:
            return _best_schedule(config, profile, options).chosen.plan
        names = ("schedule", "weights", "prediction", "error_feedback")
        asked = {name: getattr(config, name) for name in names}
        return partition(profile, program=program(config.program), **asked, **options)
    except TooSmall as error:  # in the spelling of options
        raise PlanError(str(error).replace("memory=", "memory.device=")) from error


def decide(config: PlanConfig, profile: Profile, options: dict[str, Any] | None = None) -> Plan:
    """Return ``plan_of`` a run, and say which ranks it leaves out; ``options``: None measures them."""
    plan = plan_of(config, profile, options or partition_options(config))
    if config.replicas.idle and plan.num_ranks < config.ranks:
        console.warn(
            f"ranks={plan.num_ranks} of {config.ranks}: no way to give more of them work has a shorter step, "
            "simulated with the exchange of gradients"
        )
    return plan


class Recorded(NamedTuple):
    """A model, its trace on one micro-batch, and that."""

    model: nn.Module
    graph: LayerGraph
    example: Example

    def measure(self, *, packs: bool = False) -> Profile:
        """Return what was measured of the model on the micro-batch; ``packs``: with the cost of codecs."""
        return measure(self.graph, self.example, packs=packs)


def record(
    config: PlanConfig,
    samples: Samples,
    *,
    model: nn.Module | None = None,
    autocast: torch.dtype | None = None,
) -> Recorded:
    """Trace the ``model``, made here unless it is given, on one micro-batch under ``autocast``."""
    model = model or build.model(config.model, describe=samples.describe, seed=config.seed)
    (example, targets), device = first_batch(config, samples), place(config).torch  # whose seconds count
    if has_meta(model):
        example = tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, example)
    else:
        model.to(device)
    try:
        graph = trace(model, example, autocast=autocast, leaves=config.model.get("leaves") or ())
    except PlanError as error:
        if len(tree_leaves(example)[0]) > 1:
            raise
        options = f"batch_size={config.batch_size} micro_batches={config.micro_batches}"
        remedy = "make micro-batches of one sample, too few for a batch norm"
        raise PlanError(f"{options} {remedy}: {error}") from error
    _check_outputs(config, graph, targets)
    return Recorded(model, graph, example)


def read_profile(config: PlanningConfig) -> Profile:
    """Return the profile that ``profile=`` names, in proportion where micro-batches have other samples."""
    profile, option = Profile.load(str(config.profile)), f"profile={config.profile}"
    device = place(config).torch.type
    if profile.device != device or (config.threads or profile.threads) != profile.threads:
        raise PlanError(
            f"{option} was measured on {profile.device} with threads={profile.threads}, found "
            f"device={device} threads={config.threads}; take these, or measure again"
        )
    config.threads, samples = profile.threads, -(-config.batch_size // config.micro_batches)
    torch.set_num_threads(config.threads)  # for what is measured of the optimizer
    if config.graph:
        raise ConfigError(f"graph=true looks at the model, and {option} goes without; drop either")
    if samples == profile.num_samples:
        return profile
    console.warn(
        f"{option} is of micro-batches of {counted(profile.num_samples, 'sample')}: seconds and bytes are "
        f"taken in proportion for those of {samples}"
    )
    return profile.of_samples(samples)


def partition_options(config: PlanConfig) -> dict[str, Any]:
    """Return what ``partition`` is asked for beside the schedule and its weights."""
    memory, replicas = config.memory, config.replicas
    optimizer = build.optimizer(config.optimizer) if config.optimizer else None
    same = "stages cuts ranks micro_batches extra_in_flight codec link weights_first recompute".split()
    return {
        **{name: getattr(config, name) for name in same},
        **{name: getattr(replicas, name) for name in ("exact", "sharded", "owner", "idle")},
        "replicas": replicas.count,
        "cluster": None if config.cluster is None else Cluster.load(config.cluster),
        "shares": replicas.shares if isinstance(replicas.shares, list) else (),
        "optimizer_state": state_per_byte(optimizer) if optimizer else None,
        "by_element": optimizer is not None and seems_by_element(optimizer),
        "update_seconds": update_seconds(optimizer) if optimizer else None,
        "memory": memory.device,
        "tier": memory.tier,
        "weights_tier": memory.weights,
        "parameters_tier": memory.parameters,
        "disk_rate": _disk_rate(config),
    }


def _disk_rate(config: PlanConfig) -> float | None:
    """Bytes per second of the disk, where the planner must choose whether to use it; 0: it may not."""
    memory = config.memory
    if memory.disk is not None and is_zero(memory.disk):
        return 0.0
    if memory.device is None or AUTO not in (memory.tier, memory.parameters):
        return None
    return disk_rate(DiskOptions(path=memory.path or Path.cwd()))


def compare_schedules(
    config: PlanConfig, profile: Profile, folder: RunFolder, options: dict[str, Any]
) -> Plan:
    """Plan and simulate every schedule for ``config``, show and save them, and return the chosen plan."""
    found = _best_schedule(config, profile, options)
    console.compared(found)
    save_json(folder.schedules, found.facts())
    job = f"micro_batches={config.micro_batches} stages={found.chosen.plan.num_stages} ranks={config.ranks}"
    title = f"{model_name(config)}, simulated from measured layers: {job}"
    draw(found.panels(), folder.schedules_picture, title=title)
    return found.chosen.plan


def _best_schedule(config: PlanConfig, profile: Profile, options: dict[str, Any]) -> Comparison:
    """Plan and simulate every schedule, and write the chosen one into ``config``."""
    options = dict(options)
    if (share := share_of(options["memory"])) is not None:  # one budget for all of them
        options["memory"] = bytes_of_share(share, functools.partial(partition, profile, **options))
    found = compare(profile, **options)
    config.schedule = found.chosen.plan.schedule
    return found


def beside(config: PlanConfig, profile: Profile, plan: Plan, options: dict[str, Any]) -> list[str]:
    """Return lines on the best other plans for the job."""
    file = None if config.cluster is None else read_cluster(config.cluster)
    ours, others = alternatives(plan, profile, options, file=file)
    return described(ours, profile, others)


def model_name(config: PlanConfig) -> str:
    """Return what a title calls the model."""
    return config.model.get("name") or config.model["_target_"].rpartition(".")[2]


def views(
    config: PlanningConfig, graph: LayerGraph | None, profile: Profile, plan: Plan, folder: RunFolder
) -> tuple[list[str], list[Path]]:
    """Write what ``config`` asks for into ``folder``; return lines to print, and the files."""
    stages = [number for number, stage in enumerate(plan.stages) for _ in stage.layers]
    rule, lines, files = plan.policy.rule, list[str](), list[Path]()
    versions = [rule.old_versions(stage, plan.num_stages) if rule else 0 for stage in stages]
    state = state_per_byte(build.optimizer(config.optimizer)) if config.optimizer else None
    state = (1.0 if state is None else state) + plan.error_feedback
    if config.replicas.shares == MEASURED:
        lines.append("replicas.shares=measured: training begins with these and follows the speed of ranks")
    if config.graph:
        assert graph is not None, "read_profile refuses it"
        from ...stages.profiling.graph_picture import drawing, figure

        found = dependencies(graph, profile, optimizer_state=state, old_versions=versions)
        found.save(folder.graph)
        title = f"{model_name(config)}: dependencies of its layers"
        save_picture(folder.graph_picture, figure(drawing(found, stages), title=title))
        files += [folder.graph, folder.graph_picture]
    if config.memory.table:
        listed = rows(profile, stages, optimizer_state=state, old_versions=versions)
        save(folder.memory_table, listed)
        lines += ["", *table(listed), ""]
        files.append(folder.memory_table)
    return lines, files
