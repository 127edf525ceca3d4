"""Every schedule on the same model: a plan and a simulated step for each, side by side, and the best of them.

Which schedule is fastest depends on the balance of the stages, the links and the memory: so all are tried on
paper before anything runs."""

import dataclasses
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from ...compression.errors import PenstockError, PlanError
from ...stages.plan.memory_model import copies, exchanges
from ...stages.plan.plan import Plan
from ...stages.plan.plan_stage import counts_of
from ...stages.profiling.network_profile import Profile, sizes_of
from ...stages.units import show_bytes, show_seconds
from ..partition.costs import with_margin
from ..partition.partition import partition
from ..schedules import SCHEDULES
from ..schedules.instruction import Programs
from ..schedules.replicated import (
    endless_programs,
    filling,
    live_micro_batches,
    live_versions,
    most_held,
    step_programs,
)
from ..schedules.simulate import simulate_plan, simulate_step
from ..schedules.verify import smallest_window
from .timeline import Panel

# What a batch's bits allow to choose from, then what has no flush and other bits than the plain loop.
SYNCHRONOUS = tuple(name for name in SCHEDULES if name not in ("async_1f1b", "custom"))
ASYNCHRONOUS = (("async_1f1b", "stashed"), ("1f1b", "double_buffered"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One schedule, simulated.

    ``panel``: a step of it; of a stream one in its middle, whose length is what a batch takes there.
    ``memory``: the most bytes on every rank. ``live_micro_batches`` and ``live_versions``: per stage.
    """

    plan: Plan
    panel: Panel
    memory: tuple[int, ...]
    live_micro_batches: tuple[int, ...]
    live_versions: tuple[int, ...]

    @property
    def name(self) -> str:
        """The schedule, and its policy of the weights if there is one."""
        return _name(self.plan.schedule, self.plan.weights)

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.panel.seconds

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they compute nothing."""
        return sum(self.panel.bubble) / len(self.panel.bubble)

    @property
    def fits(self) -> bool:
        """True if the fullest rank keeps to the memory of the plan."""
        budgets = (self.plan.budget([rank]) for rank in range(self.plan.num_ranks))
        pairs = zip(self.memory, budgets, strict=True)
        return all(budget is None or with_margin(used) <= budget for used, budget in pairs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All schedules that suit the stages, ranks and micro-batches; ``left_out`` says of the others why."""

    candidates: tuple[Candidate, ...]
    left_out: Mapping[str, str]
    num_samples: int

    @property
    def chosen(self) -> Candidate:
        """The shortest step that fits, with the bits of the plain loop; of equals the smallest."""
        fitting = [one for one in self.candidates if one.fits and not one.plan.streams]
        if not fitting:
            why = "; ".join(f"{name}: {reason}" for name, reason in self.left_out.items())
            raise PlanError(f"no synchronous schedule fits: {why or 'memory is too small'}")
        return min(fitting, key=lambda one: (round(one.seconds, 9), max(one.memory)))

    def facts(self) -> dict[str, Any]:
        """Return the content of ``schedules.json``."""
        best = self.chosen
        rows = [
            {
                "schedule": one.plan.schedule,
                "weights": one.plan.weights,
                "seconds": one.seconds,
                "samples_per_second": self.num_samples / one.seconds,
                "bubble": list(one.panel.bubble),
                "memory_bytes": list(one.memory),
                "fits": one.fits,
                "live_micro_batches": list(one.live_micro_batches),
                "live_versions": list(one.live_versions),
                "chosen": one is best,
            }
            for one in self.candidates
        ]
        return {"schedules": rows, "left_out": dict(self.left_out)}

    def panels(self) -> list[Panel]:
        """A timeline for each candidate, the chosen one marked."""
        best, panels = self.chosen, []
        for one in self.candidates:
            parts = [f"{one.name}{' (chosen)' * (one is best)}: {show_seconds(one.seconds)} a step"]
            parts += [f"bubble {one.bubble:.0%}", f"{show_bytes(max(one.memory))} on the fullest rank"]
            parts += ["the middle of a stream: no flush"] * one.plan.streams
            parts += ["more than there is"] * (not one.fits)
            panels.append(dataclasses.replace(one.panel, title=", ".join(parts), marked=one is best))
        return panels


def _name(schedule: str, weights: str) -> str:
    return schedule if weights == "latest" else f"{schedule} {weights}"


def compare(profile: Profile, **options: Any) -> Comparison:
    """Plan and simulate every schedule; ``options`` are those of ``partition``, less schedule and weights."""
    known = {name: options[name] for name in ("optimizer_state", "by_element") if name in options}
    candidates, refused = list[Candidate](), dict[str, PenstockError]()
    for name, weights in [*((name, "latest") for name in SYNCHRONOUS), *ASYNCHRONOUS]:
        try:
            plan = partition(profile, schedule=name, weights=weights, **options)
            candidates.append(candidate(profile, plan, **known))
        except PenstockError as error:
            refused[_name(name, weights)] = error
    if not candidates:
        raise next(iter(refused.values()))
    return Comparison(
        candidates=tuple(candidates),
        left_out={name: str(error) for name, error in refused.items()},
        num_samples=profile.num_samples * candidates[0].plan.micro_batches,
    )


def candidate(
    profile: Profile, plan: Plan, *, optimizer_state: float | None = None, by_element: bool = False
) -> Candidate:
    """Simulate the step of a plan, with the bytes that ``profile`` measured and those of an optimizer, as
    ``partition`` is told of it."""
    programs, panel = simulated(plan)
    versions = live_versions(programs, weights=plan.weights, micro_batches=plan.micro_batches)
    layers = {layer.name: layer for layer in profile.layers}
    sizes = [sizes_of([layers[name] for name in stage.layers]) for stage in plan.stages]

    def held(number: int, in_flight: int) -> int:
        """Bytes of a stage on its rank with so many micro-batches in flight."""
        stage, decided = plan.stages[number], ("tier", "weights_tier", "parameters_tier", "recompute")
        counts = counts_of(plan.shares[number], plan.micro_batches)
        options: dict[str, Any] = {name: getattr(stage, name) for name in decided}
        options |= {"device": profile.device, "exchanged": exchanges(counts, exact=plan.exact)}
        options |= {"optimizer_state": optimizer_state, "by_element": by_element}
        if plan.sharded and plan.owners == "spread":
            options["optimizer_state"] = (1.0 if optimizer_state is None else optimizer_state) / len(counts)
        there = copies(in_flight, old_versions=versions[number] - 1, **options)
        bytes_of = sizes[number] if stage.prefetches else {**sizes[number], "neighbours": 0}
        if stage.recompute:
            bytes_of |= {"near": stage.near_bytes or 0, "packed": stage.kept_bytes}
        kept = there.of(**bytes_of, entered=plan.bytes_entering(number), staying=stage.staying_bytes)
        return kept + stage.frame_bytes

    return Candidate(
        plan=plan,
        panel=panel,
        memory=most_held(programs, held),
        live_micro_batches=live_micro_batches(programs),
        live_versions=versions,
    )


def check_order(plan: Plan) -> None:
    """Refuse now the order of a plan that no pipeline would run, its stages taken for a chain."""
    if not plan.streams:
        ranks: Any = {"rank_of": plan.rank_of if max(plan.replicas) > 1 else None}
        chain = list(pairwise(range(plan.num_stages)))
        smallest_window(step_programs(plan), num_micro_batches=plan.micro_batches, edges=chain, **ranks)


def simulated(plan: Plan) -> tuple[Programs, Panel]:
    """The programs of a plan, and the timeline of its step; of a stream, programs of enough batches for it to
    be full, and a step in its middle: one batch more takes a step more, filling and draining left out."""
    if not plan.streams:
        programs, simulation = simulate_step(plan)
        return programs, Panel(title=plan.schedule, spans=simulation.spans)
    options = {"schedule": plan.schedule, "micro_batches": plan.micro_batches}
    longer, shorter = (endless_programs(plan.stages_of_rank, **options, more=more) for more in (2, 1))
    simulation, before = simulate_plan(plan, longer), simulate_plan(plan, shorter)
    first = f"0F{filling(plan.num_stages, plan.micro_batches) * plan.micro_batches}"
    begin = next(span.start + span.waiting for span in simulation.spans if span.name == first)
    end = begin + simulation.seconds - before.seconds
    return longer, Panel(title=plan.schedule, spans=simulation.spans, begin=begin, end=end)
