"""Owners of parameters, which all ranks know without asking, and the stages that run in this process."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...compression.codec import CODECS
from ...compression.errors import ConfigError, PlanError
from ...compression.names import AUTO
from ...stages.device import Device
from ...stages.memory.byte_budget import Tiers
from ...stages.memory.disk import MOST_WAITING, REQUEST_BYTES, Disk, DiskOptions
from ...stages.memory.parameter_offload import (
    OffloadedParameters,
    directly_read,
    readers_of,
    sharing,
    without_resident,
)
from ...stages.memory.prefetch import MemoryThread
from ...stages.memory.stores import StoreOptions, open_store
from ...stages.plan.plan import Plan
from ...stages.profiling.measure import owned_parameters
from ...stages.stage.nan_check import Guard
from ...stages.stage.stage import Stage
from ...stages.tracing.aliases import shared_memory_reason
from ...stages.tracing.layers import parts_of
from ...stages.tracing.tracer import LayerGraph
from ...stages.weight_versions.versions import versions_of
from ..distributed.process_group import World
from ..optimizer.flat import owners_of
from ..optimizer.optimizers import Named
from .step_planner import Steps

WAITING_SHARE = 16  # of the memory of a rank, one part may wait to be written
LEAST_MIRRORED = 1 << 12  # bytes of a parameter from which on moving it is worth the calls


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """``layers``: the stage of every layer; ``stage_of``: the stage of every parameter by its first name;
    ``owner``: the rank that answers for a stage, rank 0 without a group; ``updaters``: that of a parameter
    which one of several replicas updates; ``here``: the parameters of each stage of this process;
    ``written``: names of frozen parameters, and of buffers, to which forwards write."""

    layers: Sequence[int]
    stage_of: Mapping[str, int]
    owner: Callable[[int], int]
    updaters: Mapping[str, int]
    here: Mapping[int, Named]
    written: Collection[str]

    @property
    def ranks(self) -> dict[str, int]:
        """The rank of every parameter, and of what an optimizer keeps of it."""
        return {name: self.owner(stage) for name, stage in self.stage_of.items()} | dict(self.updaters)

    @property
    def parts(self) -> Mapping[str, int]:
        """For every parameter a number of the optimizer that has it."""
        return self.updaters or self.stage_of

    @property
    def tensors(self) -> dict[int, list[nn.Parameter]]:
        """The parameters of each stage of this process without their names."""
        return {stage: [parameter for _, parameter in named] for stage, named in self.here.items()}


def ownership(model: nn.Module, plan: Plan, graph: LayerGraph, steps: Steps, world: World) -> Ownership:
    """Return who owns the parameters of ``model``: a shared one belongs to its first user."""
    layers = steps.stage_of["train"]
    _check_shared(graph, steps, plan)
    pairs = zip(layers, owned_parameters(graph), strict=True)
    stage_of = {name: stage for stage, names in pairs for name in names}
    mine = [s for s in range(plan.num_stages) if world.is_alone or world.rank in plan.stages[s].ranks]
    of_stages = [
        [(n, p) for n, p in model.named_parameters() if stage_of[n] == s] for s in range(plan.num_stages)
    ]
    return Ownership(
        layers=layers,
        stage_of=stage_of,
        owner=(lambda stage: 0) if world.is_alone else plan.owner,
        updaters=_updaters(plan, of_stages, graph) if plan.sharded and not world.is_alone else {},
        here={s: of_stages[s] for s in mine},
        written=graph.written,
    )


def _updaters(plan: Plan, of_stages: Sequence[Named], graph: LayerGraph) -> dict[str, int]:
    """The rank that updates each parameter, of replicas that divide them; one for those in one memory."""
    found = {}
    for stage, named in zip(plan.stages, of_stages, strict=True):
        places = [0] * len(named)
        if plan.owners == "spread":
            places = owners_of([p.nbytes for _, p in named], replicas=len(stage.ranks))
        found |= {name: stage.ranks[place] for (name, _), place in zip(named, places, strict=True)}
    for group in graph.shared[0]:
        names = [name for name in group if name in found]
        found |= {name: found[names[0]] for name in names}
    return found


def _check_shared(graph: LayerGraph, steps: Steps, plan: Plan) -> None:
    """Check that tensors in one memory are on one stage, and that each has one version."""
    shared: dict[str, Any] = dict(zip(("train", "eval"), graph.shared, strict=True))
    for mode, stage_of in steps.stage_of.items():
        places = [*stage_of, plan.num_stages - 1]  # the model's output reads last
        for names, layers in shared[mode].items():
            if plan.versions is not None:
                raise PlanError(
                    f"versions of the weights need parameters in memory of their own, and {names[0]} shares "
                    f"that of {names[1]}; make them one parameter, or give one memory of its own (clone)"
                )
            if len({places[layer] for layer in layers}) > 1:
                raise PlanError(
                    f"the plan parts what belongs together: {shared_memory_reason(names)}; plan again"
                )


def make_stages(
    own: Ownership, *, model: nn.Module, plan: Plan, steps: Steps, autocast: torch.dtype | None,
    devices: Mapping[int, Device], memory: MemoryThread, guard: Guard | None, stores: StoreOptions,
) -> dict[int, Stage]:  # fmt: skip
    """Return the stages of this process, each with its layers, its store and its versions of the weights."""
    # 1. The mirrors of offloaded parameters, which come and go as ``memory`` says.
    mirrors = dict[int, OffloadedParameters | None]()
    shared = sharing([*model.parameters(), *model.buffers()])
    for index, named in own.here.items():
        planned, runs = plan.stages[index], []
        if planned.parameters_tier == "device":
            mirrors[index] = None
            continue
        able = {id(parameter) for name, parameter in named if name not in own.written} - shared
        for other, mode in itertools.product(own.here, steps.stage_of):
            traced, layers = steps.layers(mode, other)
            parts = parts_of(model, traced, layers)
            if other == index:
                runs.append((traced, layers, parts, steps.shapes.real[mode]))
            else:  # a frozen module may be called in several stages
                able -= {id(parameter) for layer in layers for parameter in directly_read(layer, parts)}
        mirrors[index] = OffloadedParameters(
            open_store(planned.parameters_tier, stores),
            readers=without_resident(readers_of(runs, able), planned.staying_bytes),
            packs=planned.parameters_tier == "packed", min_bytes=LEAST_MIRRORED,
            weights_first=plan.weights_first, ahead=memory.turns_ahead, stays=memory.turns_staying,
            prefetches=planned.prefetches,
        )  # fmt: skip
    # 2. The stages.
    found, num_stages = dict[int, Stage](), plan.num_stages
    for index, parameters in own.tensors.items():
        planned, mirror = plan.stages[index], mirrors[index]
        policy = dataclasses.replace(plan.policy, tier=planned.weights_tier)
        found[index] = Stage(
            index, model=model, train=steps.layers("train", index), evaluation=steps.layers("eval", index),
            last=index == num_stages - 1, autocast=autocast, memory=memory, mirror=mirror,
            store=None if planned.tier == "device" else open_store(planned.tier, stores),
            codec=plan.codec if plan.codec in CODECS else AUTO,  # lossy ones lose on the wire only
            weights=versions_of(
                policy, parameters, stage=index, num_stages=num_stages, options=stores, mirror=mirror
            ),
            weights_first=plan.weights_first, recompute=planned.recompute, written=steps.written,
            device=devices[index], guard=guard,
        )  # fmt: skip
    return found


def disk_of(own: Ownership, plan: Plan, options: DiskOptions, tiers: Tiers) -> Disk | None:
    """Return the disk that all stores of this process share; None where nothing of it may go there."""
    stages = [plan.stages[index] for index in own.here]
    asked = {tier for one in stages for tier in (one.tier, one.weights_tier, one.parameters_tier)}
    limits = tiers.device.limit, tiers.host.limit
    spills = any(limit is not None for limit in limits) and asked & {"packed", "host"}
    if "disk" in asked and not options.allowed:
        raise ConfigError(
            "budget=0 allows nothing on disk, found a plan whose stages use the tier disk; raise the budget, "
            "or plan with another tier"
        )
    if not options.allowed or not (spills or "disk" in asked):
        return None
    most = MOST_WAITING
    if (limit := tiers.device.limit) is not None:
        most = min(most, max(limit // WAITING_SHARE, REQUEST_BYTES))
    return Disk(options, tiers=tiers, most_waiting=most)
