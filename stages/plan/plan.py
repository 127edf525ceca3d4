"""Plan: the whole decision as data: the stages with what was decided for each, the schedule and the codec.

A plan can be printed, drawn, saved, edited and loaded again: a person sees and owns what will run."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...compression.errors import PlanError
from ...compression.names import AUTO, LOSSY, show_codec
from ..files import save_json, save_picture
from ..memory.byte_budget import NAMES
from ..record import IN_PROCESS, json_fields, load_json, read, reduced, shortened
from ..tracing.capture.signature import Signature
from ..units import show_bytes, show_count, show_rate, show_seconds, text_table
from ..weight_versions.policies import WeightPolicy, policy_named
from . import validation
from .cluster import Cluster
from .plan_stage import PlanStage, place_of, shares_of_stage, show_sent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """``stages``, ``ranks`` and ``cuts`` as a person gave them, None: left to the planner; ``replicas``
    where there are some, ``divided``: how it was asked for where the planner chose them."""

    stages: int | None
    ranks: int | None
    cuts: tuple[str, ...] | None
    replicas: tuple[int, ...] | None = None
    divided: str | None = None

    def __str__(self) -> str:
        asked = {"stages": self.stages, "ranks": self.ranks, "cuts": self.cuts and f"[{','.join(self.cuts)}]"}
        asked |= {"replicas": self.divided or (self.replicas and list(self.replicas))}
        return " ".join(f"{name}={value}" for name, value in asked.items() if value is not None)


_HEADINGS = ("stage", "rank", "layers", "parameters", "forward", "backward", "memory", "sent down", "sent up")
_FOOTNOTE = "predicted per micro-batch; memory for all micro-batches in flight; sent: tensors -> frames"


def _table(stages: Sequence[PlanStage]) -> list[str]:
    rows = [
        (
            str(number),
            ",".join(map(str, stage.ranks)),
            f"{' .. '.join(dict.fromkeys((stage.layers[0], stage.layers[-1])))} ({len(stage.layers)})",
            show_count(stage.num_parameters),
            show_seconds(stage.forward_seconds),
            show_seconds(stage.backward_seconds),
            show_bytes(stage.held_bytes),
            show_sent(stage.bytes_forward, stage.packed_forward),
            show_sent(stage.bytes_backward, stage.packed_backward),
        )
        for number, stage in enumerate(stages)
    ]
    right = [heading for heading in _HEADINGS if heading != "layers"]
    return [*text_table(_HEADINGS, rows, right=right), _FOOTNOTE]


VERSION = 3
TIERS = NAMES


def check_tiers(**found: str) -> None:
    """Refuse what is no tier; ``found``: by what it is called."""
    for name, tier in found.items():
        if tier not in TIERS:
            raise PlanError(f"{name} is one of {', '.join(TIERS)}, found {tier!r}; choose one of these")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions of ``partition`` that ``Pipeline`` runs; those for a stage are in its ``PlanStage``.

    ``extra_in_flight``: micro-batches in flight beyond the schedule's own, to begin with; up to
    ``most_extra_in_flight``, if the measured links ask for it; 0 there means no more than these.
    ``codec``: that of every value and gradient for which its stage names no other.
    ``weights``: which version of the weights a micro-batch sees (``POLICIES``); ``prediction``: forwards run
    with the weights as they are expected to be at the backward; ``error_feedback``: an update makes up for
    the delay of the one before; ``weights_first``: in a backward a layer's
    weight gradient comes before the gradient of its input. ``program``: a custom schedule, a line for each
    rank. ``exact``: replicas add up gradients micro-batch by micro-batch, as the plain loop does;
    ``sharded``: each of them updates some parameters for all, and keeps the optimizer's state of these;
    ``owners``: which one updates a parameter: "spread", by bytes, or "first", all of them.
    ``memory`` is a rank's budget in bytes, ``link`` the rate in bits per second; None means unlimited.
    ``cluster``: ranks that differ, in the place of ``memory`` and ``link``.
    ``asked``: which cuts ``partition`` was asked for; None in a plan that does not know.
    ``signature``: how the model is called, None for by position; ``leaves``: what is one layer, by request or
    need. ``graph``: the LayerGraph that it was made from, in this process only.

    Raises:
        PlanError: The fields contradict each other.
    """

    stages: tuple[PlanStage, ...]
    schedule: str
    micro_batches: int
    extra_in_flight: int
    codec: str
    fingerprint: str
    input_shapes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    memory: int | None
    link: float | None
    most_extra_in_flight: int = 0
    weights: str = "latest"
    weights_first: bool = False
    prediction: bool = False
    error_feedback: bool = False
    program: tuple[str, ...] = ()
    exact: bool = False
    sharded: bool = False
    owners: str = "spread"
    asked: Asked | None = dataclasses.field(default=None, compare=False)
    signature: Signature | None = dataclasses.field(default=None, compare=False)
    leaves: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    cluster: Cluster | None = None
    graph: Any = dataclasses.field(default=None, compare=False, repr=False, metadata=IN_PROCESS)

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)

    def __post_init__(self) -> None:
        layers = [layer for stage in self.stages for layer in stage.layers]
        if not self.stages or not all(stage.layers for stage in self.stages):
            raise PlanError("a plan has one stage or more, and every stage has a layer")
        if twice := next((layer for layer, other in pairwise(sorted(layers)) if layer == other), None):
            raise PlanError(f"a layer belongs to one stage, the plan has {twice!r} twice")
        for stage in self.stages:
            check_tiers(**{n: getattr(stage, n) for n in ("tier", "weights_tier", "parameters_tier")})
            kinds = {"prediction": self.prediction, "error_feedback": self.error_feedback}
            validation.check_mirror(**kinds, parameters_tier=stage.parameters_tier)
        if {*self.ranks} != {*range(len({*self.ranks}))}:
            raise PlanError(
                f"a plan gives each of its {self.num_stages} stages a rank, and every rank from 0 on a "
                f"stage, found ranks {list(self.ranks)}"
            )
        if self.cluster is not None:
            self.cluster.check(self.num_ranks)
        names = ("schedule", "weights", "micro_batches")
        asked: Any = {name: getattr(self, name) for name in names}
        validation.check_replicas([stage.ranks for stage in self.stages], **asked)
        extra = max(self.extra_in_flight, self.most_extra_in_flight)
        asked |= {"prediction": self.prediction, "num_stages": self.num_stages, "extra_in_flight": extra}
        validation.check_versions(**asked, error_feedback=self.error_feedback)
        if self.streams and any(stage.recompute for stage in self.stages):
            validation.check_again(weights=self.weights, prediction=self.prediction)
        validation.check_owner(self.owners, sharded=self.sharded)
        most = self.most_extra_in_flight
        validation.check_extra(self.extra_in_flight, most, micro_batches=self.micro_batches)
        names = [field.name for field in dataclasses.fields(PlanStage)]
        counts = [n for s in self.stages for name in names if isinstance(n := getattr(s, name), int | float)]
        counts += [self.extra_in_flight, self.most_extra_in_flight, *sum(self.input_shapes, ())]
        no_memory = self.memory is not None and self.memory < 1
        if min(counts) < 0 or no_memory or (self.link is not None and self.link <= 0):
            raise PlanError("sizes, seconds and counts of a plan are never negative; make the plan anew")

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all stages; ``rank_of`` says where something runs."""
        return tuple(rank for stage in self.stages for rank in stage.ranks)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of ranks of each stage."""
        return tuple(len(stage.ranks) for stage in self.stages)

    @property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """By what weight the replicas of each stage take its micro-batches."""
        return tuple(stage.shares or (1,) * len(stage.ranks) for stage in self.stages)

    @property
    def num_ranks(self) -> int:
        """Number of processes the plan is made for."""
        return max(self.ranks) + 1

    @property
    def stages_of_rank(self) -> list[list[int]]:
        """The stages of each rank, as the schedules take them."""
        numbered = list(enumerate(self.stages))
        return [[s for s, stage in numbered if rank in stage.ranks] for rank in range(self.num_ranks)]

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """The rank that runs ``stage`` (-1: the last) for ``micro_batch``."""
        return self.stages[stage].ranks[self.place_of(stage, micro_batch)]

    def place_of(self, stage: int, micro_batch: int) -> int:
        """Number, from 0, of the replica that runs ``stage`` for ``micro_batch``."""
        one = self.stages[stage]
        return place_of(one.shares, micro_batch) if one.shares else micro_batch % len(one.ranks)

    def owner(self, stage: int) -> int:
        """The rank that answers for ``stage`` (-1: the last) whatever the shares: its first one."""
        return self.stages[stage].ranks[0]

    def with_shares(self, shares: Sequence[Sequence[int]]) -> Plan:
        """The same with these shares of each stage; none where its replicas are to take as many.

        Raises:
            PlanError: A stage cannot be dealt by them.
        """
        if len(shares) != self.num_stages:
            raise PlanError(
                f"every stage has its shares, found shares of {len(shares)} stages for {self.num_stages}; "
                "give those of each"
            )
        found = map(shares_of_stage, shares, range(self.num_stages), self.replicas)
        pairs = zip(self.stages, found, strict=True)
        stages = tuple(dataclasses.replace(stage, shares=own) for stage, own in pairs)
        return dataclasses.replace(self, stages=stages)

    def budget(self, ranks: Collection[int]) -> int | None:
        """The most bytes of a process that is these ranks; None: unlimited."""
        if self.cluster is None:
            return None if self.memory is None else self.memory * len(ranks)
        budgets = [self.cluster.memory[rank] for rank in ranks]
        return None if None in budgets else sum(filter(None, budgets))

    def rate(self, one: int, other: int) -> float | None:
        """Bits per second between two ranks; None: unlimited."""
        return self.cluster.links[min(one, other)] if self.cluster else self.link

    @property
    def policy(self) -> WeightPolicy:
        """Policy of the stages for their weights; in which tier, each says for itself."""
        return policy_named(self.weights, schedule=self.schedule, prediction=self.prediction)

    @property
    def streams(self) -> bool:
        """Return whether batches follow each other without a flush: a step leaves micro-batches in flight."""
        return validation.streams(self.schedule, self.weights)

    @property
    def versions(self) -> dict[str, Any] | None:
        """Fields that decide which weights a micro-batch sees, as a state's must; None with a flush."""
        if not self.streams:
            return None
        names = ("schedule", "weights", "prediction", *["error_feedback"] * self.error_feedback)
        return {name: getattr(self, name) for name in names} | {"cuts": list(self.cuts)}

    @property
    def cuts(self) -> tuple[str, ...]:
        """The layers after which the model is cut, as ``partition`` takes them."""
        return tuple(stage.layers[-1] for stage in self.stages[:-1])

    def bytes_entering(self, stage: int) -> int:
        """Bytes of the tensors of a micro-batch that pass the cut in front of ``stage``, unpacked."""
        return self.stages[stage - 1].bytes_forward if stage else 0

    @property
    def named_codecs(self) -> dict[tuple[str, str, int], str]:
        """The codecs that stages name, by value, way ("F" down, "B" up for its gradient) and stage."""
        named = [(s, "F", stage.codecs) for s, stage in enumerate(self.stages)]
        named += [(s, "B", stage.gradient_codecs) for s, stage in enumerate(self.stages)]
        return {(name, way, s): codec for s, way, codecs in named for name, codec in codecs.items()}

    def of_stages(self, decision: str) -> str:
        """Return the stages' decisions under a name, such as "tier": one if all are alike, else each."""
        found = [str(getattr(stage, decision)) for stage in self.stages]
        return found[0] if len(set(found)) == 1 else ",".join(found)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON data, which ``Plan.of_json`` takes."""
        return {"penstock_plan": VERSION, **json_fields(self)}

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all, else ConfigError; ``Plan.load`` gives an equal one."""
        save_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan; raises PlanError, and nothing else, for a file that is missing, damaged or no plan."""
        return cls.of_json(load_json(path, "plan"), str(path))

    @classmethod
    def of_json(cls, data: Any, source: str) -> Plan:
        """Read a plan that came from ``source``; raises PlanError, and nothing else, for what is none."""
        if not isinstance(data, dict) or "penstock_plan" not in data:
            raise PlanError(
                f"a plan is a JSON object with the key penstock_plan, {source} is not; make one anew"
            )
        version = data.pop("penstock_plan")
        if type(version) is not int or version != VERSION:
            raise PlanError(
                f"plans have version {VERSION} here, found {shortened(version)} in {source}; make "
                "the plan anew"
            )
        return read(cls, data, "plan")

    def draw(self, path: str | Path) -> None:
        """Draw the stages, their seconds and the bytes over each cut into a PNG."""
        from .plan_picture import figure

        save_picture(path, figure(self.stages, title=_title(self)))

    def __str__(self) -> str:
        return "\n".join([_title(self), *_table(self.stages)])


def _title(plan: Plan) -> str:
    batches = f"{plan.micro_batches} micro-batch{'es' * (plan.micro_batches > 1)}"
    parts = [plan.schedule, batches, f"codec {show_codec(plan.codec)}"]
    if plan.most_extra_in_flight > plan.extra_in_flight:
        parts.insert(1, f"{plan.extra_in_flight} to {plan.most_extra_in_flight} extra in flight")
    elif plan.extra_in_flight:
        parts.insert(1, f"{plan.extra_in_flight} extra in flight")
    ways = {"F": "down", "B": "up"}
    named = plan.named_codecs
    if plan.codec == AUTO and not {*named.values()} & {*LOSSY}:  # each only begins with it
        parts[-1] += f" from {' and '.join(dict.fromkeys(named.values()))}" * bool(named)
    else:
        parts += [f"{name} {ways[way]} {show_codec(one)}" for (name, way, _), one in named.items()]
    # Which weights a micro-batch sees, where batches mingle, and what comes first in a backward.
    if plan.streams:
        parts.append(f"weights {plan.weights}{' with prediction' * plan.prediction}")
    parts += ["error feedback"] * plan.error_feedback
    if (tier := plan.of_stages("weights_tier")) != "device":
        parts.append(f"old weights {tier}")
    if (tier := plan.of_stages("parameters_tier")) != "device":
        staying = sum(stage.staying_bytes for stage in plan.stages)
        parts.append(f"parameters {tier}{f' but {show_bytes(staying)}' * bool(staying)}")
    parts += ["weight gradients first"] * plan.weights_first
    if (tier := plan.of_stages("tier")) != "device":
        parts.append(f"saved tensors {tier}")
    if again := next((stage.recompute for stage in plan.stages if stage.recompute), False):
        parts.append("forwards run again" if again is True else f"{', '.join(again)} run again")
    if max(plan.replicas) > 1:
        parts.append(f"replicas {list(plan.replicas)}{' that add as one' * plan.exact}")
    if plan.sharded:
        parts.append(f"the optimizer's state {validation.OWNERS[plan.owners]}")
    if any(stage.shares for stage in plan.stages):
        parts.append(f"shares {[list(own) for own in plan.shares]}")
    if plan.link is not None:
        parts.append(f"link {show_rate(plan.link)}")
    if plan.cluster is not None:
        parts.append(f"cluster {plan.cluster}")
    if plan.memory is not None:
        parts.append(f"memory {show_bytes(plan.memory)} a rank")
    shape = (plan.num_stages, "stage"), (plan.num_ranks, "rank")
    counts = [f"{n} {word}{'s' * (n > 1)}" for n, word in shape]
    return f"{' on '.join(counts)}, {', '.join(parts)}"
