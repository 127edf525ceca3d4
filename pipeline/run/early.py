"""Refusals that need only names, counts and files, made before torch is imported.

A refusal that a person waits for is one that they meet again and again: torch takes seconds to load and a
model more to trace, so all that needs neither is checked here, once, and nothing here may import them.
"""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...compression.errors import ConfigError, PlanError, ScheduleError
from ...compression.names import AUTO, check_name
from ...conf import groups
from ...conf.schema import (
    EVEN,
    MEASURED,
    MemoryConfig,
    PlanConfig,
    PlanningConfig,
    TrainConfig,
    count_or_auto,
    shown,
)
from ...stages.plan.cluster import Cluster
from ...stages.plan.plan import Plan, check_tiers
from ...stages.plan.plan_stage import split_shares
from ...stages.plan.validation import check_mirror, check_replicas, check_versions
from ...stages.units import is_zero, parse_bytes, parse_duration, parse_rate, share_of
from ..data.options import check_files
from ..distributed.launcher import Launched, check_ranks, cores
from ..partition.counts import check_asked, replica_counts, sizes, stage_counts
from ..schedules import SCHEDULES, schedule_named
from ..schedules.building_blocks import layout, placed, placement, stages_on
from ..schedules.custom import load_program
from ..schedules.replicated import check_divided, dealt

ALL = "all"  # the schedule that stands for every one: they are compared, and the best is planned
# What a plan decides, by the names of options.
TAKEN = (
    "schedule", "micro_batches", "extra_in_flight", "codec", "weights", "weights_first", "prediction",
    "error_feedback",
)  # fmt: skip


def check(config: PlanConfig, typed: Sequence[str] = ()) -> Plan | None:
    """Return the plan that ``plan=`` names, its decisions written into ``config``; None without it.

    Args:   typed: the options as typed, so that one that contradicts ``plan=`` is refused and not ignored."""
    if "ranks" in config.searched and config.cluster is not None:
        raise ConfigError(f"cluster={config.cluster} has its ranks, found ranks=auto; drop either")
    if "ranks" in config.searched:
        config.ranks = max(1, cores() // (config.threads or 1))  # at most
        if isinstance(config.device, list):
            raise ConfigError(
                f"device={shown(config.device)} is for as many ranks, found ranks=auto; drop either"
            )
    given = load_plan(config, typed) if isinstance(config, TrainConfig) and config.plan else None
    if config.cluster is not None and given is None:
        _take_cluster(config, typed)
    if isinstance(config, TrainConfig):
        check_ranks(config.ranks)
        _check_launcher(config)
        if config.audit.every is not None:
            parse_duration(config.audit.every, name="audit.every")
        needs = {f"logger={name}": name for name in config.loggers if name != "csv"}
        if config.cache.backend is not None:
            needs[f"cache.backend={config.cache.backend}"] = "redis"
        for option, name in needs.items():
            if not _findable(name):
                raise ConfigError(f"{option} needs the package {name}, which is missing; pip install {name}")
    memory, lines = config.memory, () if given else program(config.program)
    if given is None and not config.searched:
        _check_counts(config, lines)
    _check_schedule(config, lines)
    check_name(config.codec)
    if given is None:  # else every stage has its own
        tiers = {f"memory.{name}": getattr(memory, name) for name in ("tier", "weights", "parameters")}
        check_tiers(**{n: tier for n, tier in tiers.items() if n == "memory.weights" or tier != AUTO})
    if config.link is not None:
        parse_rate(config.link)
    for name, size in {"memory.device": memory.device, "memory.host": memory.host}.items():
        if size is not None and (name == "memory.host" or share_of(size, name=name) is None):
            parse_bytes(size, name=name)
    _check_disk(memory)
    if "workers" in config.data:
        config.data["workers"] = count_or_auto("data.workers", config.data["workers"])
    if not isinstance(skips := config.data.get("skip_broken", False), bool):
        raise ConfigError(f"data.skip_broken={skips} must be true or false")
    for group in groups.groups():
        if (options := getattr(config, group, None)) is not None:
            _check_group(group, options)
    return given


def check_chosen(config: PlanConfig) -> None:
    """Refuse what ``check`` could not see before ``ranks`` and ``micro_batches`` were chosen."""
    lines = program(config.program)
    _check_counts(config, lines)
    _check_schedule(config, lines)


def how_to_name(group: str, path: str) -> str:
    """Return what to do about a name that cannot be imported."""
    if re.search(r"\.py\b", path):
        dotted = re.sub(r"\.py\b", "", path).replace(":", ".").replace("/", ".").strip(".")
        return f"name a module and not a file: {group}._target_={dotted}"
    return "check the name and the folder" if "." in path else f"write {group}._target_=MODULE.{path}"


def _check_group(group: str, options: Mapping[str, Any]) -> None:
    """Refuse options of a group that nothing reads, a target in no module, and data in no file."""
    groups.check(group, options)
    target = options.get("_target_")
    if str(target).startswith("penstock.pipeline.samples."):
        raise ConfigError(
            f"{group}._target_ is in a module of another name now, found {target}; write "
            f"{str(target).replace('.samples.', '.data.', 1)}"
        )
    if isinstance(target, str) and not _findable(target.partition(".")[0].partition(":")[0]):
        raise ConfigError(
            f"{group}._target_={target} cannot be imported (No module named '{target.partition('.')[0]}'); "
            f"{how_to_name(group, target)}"
        )
    if group == "data":
        check_files(options)


def program(path: str | None) -> tuple[str, ...]:
    """Return the lines of a custom schedule; raises ConfigError: the file is none, or cannot be read."""
    try:
        return () if path is None else load_program(path)
    except ScheduleError as error:
        raise ConfigError(f"program={error}") from error


def keys_of(typed: Sequence[str]) -> list[str]:
    """Return the options that were typed, without their values."""
    return [option.partition("=")[0].lstrip("+") for option in typed]


def _take_cluster(config: PlanConfig, typed: Sequence[str]) -> None:
    """Write the number of ranks of ``cluster=`` into ``config``; refuse what the file says itself."""
    number, keys = Cluster.load(str(config.cluster)).num_ranks, keys_of(typed)
    for key, value in {"link": config.link, "memory.device": config.memory.device}.items():
        if value is not None:
            raise ConfigError(f"cluster={config.cluster} has the memory and links of its ranks; drop {key}=")
    if "ranks" in keys and config.ranks != number:
        raise ConfigError(
            f"cluster={config.cluster} has {number} ranks, found ranks={config.ranks}; drop ranks="
        )
    config.ranks = number


def load_plan(config: TrainConfig, typed: Sequence[str]) -> Plan:
    """Return the plan that ``plan=`` names, its decisions written into ``config``."""
    plan = Plan.load(str(config.plan))
    keys = keys_of(typed)
    for key in ("link", "cluster", "memory.device"):
        if key in keys:
            raise ConfigError(f"{key}= is for making a plan, and plan={config.plan} is one; drop either")
    decided: dict[str, Any] = {"ranks": plan.num_ranks, "stages": plan.num_stages}
    decided |= {key: getattr(plan, key) for key in TAKEN}
    if plan.most_extra_in_flight > plan.extra_in_flight:
        decided["extra_in_flight"] = AUTO
    decided |= {"memory.tier": plan.of_stages("tier"), "memory.weights": plan.of_stages("weights_tier")}
    decided["memory.parameters"] = plan.of_stages("parameters_tier")
    counts = list(plan.replicas)
    decided["replicas.count"] = counts if len(set(counts)) > 1 else counts[0]
    decided |= {"replicas.exact": plan.exact, "replicas.sharded": plan.sharded, "replicas.owner": plan.owners}
    decided["replicas.shares"] = _shares_by(plan, config.replicas.shares)
    for key, value in decided.items():
        group, _, name = key.rpartition(".")
        place = getattr(config, group) if group else config
        if key in keys and key not in config.searched and (asked := getattr(place, name)) != value:
            there = f"plan={config.plan} with {key}={value}"
            raise ConfigError(f"{key}={asked} contradicts {there}; drop either")
        setattr(place, name, value)
    config.searched = ()
    config.__post_init__()  # its rules hold for what the plan decided, too
    _check_devices(config)
    return plan


def _check_devices(config: PlanConfig) -> None:
    if isinstance(config.device, list) and len(config.device) != config.ranks:
        raise ConfigError(
            f"device={shown(config.device)} names {len(config.device)} for ranks={config.ranks}; name one "
            "for each rank"
        )
    kinds = {str(device).partition(":")[0] for device in config.devices} - {AUTO}
    if len(kinds) > 1 and config.cuts is None and not getattr(config, "plan", None):
        raise ConfigError(
            f"device={shown(config.devices)} computes on {' and '.join(sorted(kinds))}, and layers are "
            "measured on one of them; give cuts= by hand"
        )


def _shares_by(plan: Plan, asked: Any) -> Any:
    """``replicas.shares=`` with a plan: the option where the plan has none, else the plan's."""
    ranks = [stage.ranks for stage in plan.stages]
    if asked == MEASURED or (
        isinstance(asked, list) and plan.with_shares(split_shares(asked, ranks)).shares == plan.shares
    ):
        return asked
    if not any(stage.shares for stage in plan.stages):
        return EVEN
    return [share for _, share in sorted(zip(plan.ranks, sum(plan.shares, ()), strict=True))]


def _check_counts(config: PlanConfig, lines: Sequence[str]) -> None:
    asked, stages, ranks = config.replicas, config.stages, config.ranks
    _check_devices(config)
    if asked.shares != EVEN and not asked.several:
        raise ConfigError(
            f"replicas.shares={asked.shares} is for stages on several ranks, found replicas.count=1; give "
            "replicas.count=, or leave it out"
        )
    shares = asked.shares if isinstance(asked.shares, list) else ()
    given = None if config.cuts is None else range(len(config.cuts))
    try:
        check_asked(asked.count, idle=asked.idle, shares=shares)
        if asked.count == AUTO:
            stage_counts(stages, given, ranks, most=ranks)
        elif asked.several:
            known = {"stages": stages, "ranks": ranks, "given": given, "schedule": config.schedule}
            counts, _ = replica_counts(asked.count, **known)
            if shares and layout(config.schedule) == "neighbours":
                split_shares(shares, dealt(counts))
        elif config.schedule in SCHEDULES:
            sizes(stages, ranks, given, config.schedule, lines)
    except PlanError as error:
        typed = {"ranks": ranks, "stages": stages, "cuts": config.cuts and shown(config.cuts)}
        typed |= {"replicas.count": asked.count, "replicas.shares": shares} if asked.count != 1 else {}
        options = " ".join(f"{name}={value}" for name, value in typed.items() if value not in (None, ()))
        raise ConfigError(f"{options}: {error}") from error


def _check_disk(memory: MemoryConfig) -> None:
    if memory.disk is None:
        return
    if not is_zero(memory.disk):
        parse_bytes(memory.disk, name="memory.disk")
        return
    for name in ("tier", "weights", "parameters"):
        if "disk" in str(getattr(memory, name)).split(","):
            raise ConfigError(
                f"memory.disk=0 allows nothing on disk, found memory.{name}={getattr(memory, name)}; raise "
                "memory.disk=, or choose another tier"
            )


def _check_launcher(config: TrainConfig) -> None:
    """Refuse restarts, fewer ranks, threads and counts to choose where another launcher starts the ranks."""
    if config.searched and Launched.of_environment():
        name = config.searched[-1]
        raise ConfigError(
            f"{name}=auto is for ranks that penstock starts, found those of a launcher; run penstock plan "
            f"{name}=auto, and give its number"
        )
    typed = [f"max_restarts={config.max_restarts}"] if config.max_restarts else []
    options = ("shrink", "threads", "idle")
    typed += [f"replicas.{name}=true" for name in options if getattr(config.replicas, name)]
    if typed and Launched.of_environment():
        raise ConfigError(
            f"{typed[0]} is for ranks that penstock starts, found those of a launcher; leave it out "
            "(torchrun restarts its ranks by --max-restarts)"
        )


def _check_schedule(config: PlanConfig, lines: Sequence[str]) -> None:
    if config.schedule in (ALL, AUTO):
        if config.schedule == AUTO or isinstance(config, PlanningConfig):
            asked = {name: getattr(config, name) for name in ("weights", "prediction", "error_feedback")}
            if given := [
                f"{name}={value}" for name, value in asked.items() if value not in ("latest", False)
            ]:
                raise ConfigError(
                    f"schedule={config.schedule} compares each schedule with the weights it has, found "
                    f"{given[0]}; leave it out, or name a schedule"
                )
            return
        raise ConfigError(
            "schedule=all compares the schedules, which penstock plan does; run penstock plan schedule=all, "
            "look, and train with plan=PATH of its plan.json"
        )
    if config.schedule not in SCHEDULES:
        raise ConfigError(
            f"schedule={config.schedule} is not known; the known ones are {', '.join([*SCHEDULES, AUTO])}"
        )
    if config.searched:
        return
    schedule = schedule_named(config.schedule)
    extra = 0 if config.extra_in_flight == AUTO else config.extra_in_flight
    asks: Any = {name: getattr(config, name) for name in ("schedule", "weights")}
    more: Any = {name: getattr(config, name) for name in ("prediction", "num_stages", "micro_batches")}
    check_versions(**asks, **more, extra_in_flight=extra, error_feedback=config.error_feedback)
    tier = config.memory.parameters.replace(AUTO, "device")
    counts = config.replicas.of_stages(config.num_stages)
    kinds = {"prediction": config.prediction, "error_feedback": config.error_feedback}
    check_mirror(**kinds, parameters_tier=tier)
    check_replicas(dealt(counts), **asks, micro_batches=config.micro_batches)
    if config.replicas.count == AUTO:
        check_divided("replicas.count=auto", **asks)
    if layout(config.schedule) == "custom":
        if not (isinstance(config, TrainConfig) and config.plan):
            placed(lines)
        return
    ranks = config.ranks
    if config.replicas.several:  # one rank is dealt over its replicas
        ranks = config.num_stages if layout(config.schedule) == "neighbours" else ranks // max(counts)
    rank_of = placement(config.schedule, stages=config.num_stages, ranks=ranks)
    schedule(stages_on(rank_of), config.micro_batches, extra_in_flight=extra)


def _findable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # it is there, and cannot tell
        return True
