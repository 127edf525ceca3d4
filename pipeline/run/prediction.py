"""The plan's prediction of a step beside what a run measured, and which term was off where they differ."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...stages.units import show_seconds
from ..schedules.instruction import Op
from ..schedules.simulate import packing_seconds, seconds_of_update

if TYPE_CHECKING:
    from ...stages.plan.plan import Plan
    from .metrics import Totals
    from .timeline import Panel

OFF = 0.15  # a step that differs by more is explained
LEAST = 3  # steps of which anything can be said
SHARE = 0.5  # of the difference, which a term must have to explain it

Rates = Mapping[tuple[int, int], float]


def compare(plan: Plan, panel: Panel, totals: Totals, *, rates: Rates | None) -> dict[str, Any] | None:
    """Return a step as the plan predicts it and as the recent steps were, but for the first: medians.

    Args:   panel: the simulated step of the plan.
            rates: measured bytes per second from rank to rank; None: not measured.
    Returns: ``step_seconds``, and of every stage the seconds of a rank: ``compute`` (of micro-batches, with
        packing where it is measured), ``transfer`` (its frames on their links), ``waiting`` (for frames), as
        ``[predicted, measured]``, the latter None where nobody knows; ``off``: why the step differs, None
        where it does not, or where the steps are few. None for a run without steps."""
    if not totals.recent:
        return None
    stages, updates = [], []
    for number, (stage, ranks) in enumerate(zip(plan.stages, totals.ranks, strict=True)):
        one, several = totals.of_step(number), len(ranks)
        spans = [
            s
            for s in panel.spans
            if s.stage == number and panel.begin <= s.start < panel.begin + panel.seconds
        ]
        packing = sum(packing_seconds(plan, number, op) for op in (Op.F, Op.B))
        computing = plan.micro_batches * (stage.forward_seconds + stage.backward_seconds + packing)
        waiting = sum(span.waiting for span in spans)
        terms = {
            "compute": (computing, one["worked_seconds"]),
            "transfer": _transfer(plan, number, one, rates),
            "waiting": (waiting, one["waiting_seconds"]),
        }
        stages.append({k: [None if v is None else v / several for v in term] for k, term in terms.items()})
        update = (one["compute_seconds"] - one["worked_seconds"]) / several
        updates.append((seconds_of_update(plan, number), update))
    step = [panel.seconds, statistics.median(seconds for seconds, _ in totals.recent)]
    off = _off(plan, step, stages, updates) if len(totals.recent) >= LEAST else None
    return {"step_seconds": step, "stages": stages, "off": off}


def _transfer(
    plan: Plan, number: int, one: Mapping[str, float], rates: Rates | None
) -> tuple[float, float | None]:
    """Seconds on the links of what a stage sends: as the plan has them, and frames at measured rates."""
    planned, measured, rank = 0.0, 0.0, plan.owner(number)
    for way, other in (("forward", number + 1), ("backward", number - 1)):
        if other in (-1, plan.num_stages) or plan.owner(other) == rank:
            continue
        cut, link = plan.stages[min(number, other)], plan.rate(rank, plan.owner(other))
        planned += plan.micro_batches * cut.transfer_seconds(way, link)
        rate = (rates or {}).get((rank, plan.owner(other)))
        measured += one[f"bytes_sent_{way}"] / rate if rate else 0.0
    return planned, measured if rates else None


def _off(
    plan: Plan, step: list[float], stages: list[dict[str, Any]], updates: list[tuple[float, float]]
) -> str | None:
    """Say by how much a step differs, and the first term that has most of the difference: what the stages of
    a rank compute, an update, waiting; if none has, say so."""
    predicted, measured = step
    more = measured - predicted
    if not predicted or abs(more) <= OFF * predicted:
        return None
    sentence = (
        f"a step took {show_seconds(measured)}, {abs(more) / predicted:.0%} {'more' if more > 0 else 'less'} "
        f"than the plan predicts ({show_seconds(predicted)})"
    )
    of_ranks = {
        numbers: [sum(stages[number]["compute"][kind] for number in numbers) for kind in (0, 1)]
        for numbers in map(tuple, plan.stages_of_rank)
    }
    numbers, (planned, found) = max(of_ranks.items(), key=lambda one: (one[1][1] - one[1][0]) / more)
    if (found - planned) / more >= SHARE:
        who = f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {', '.join(map(str, numbers))}"
        instead = f"{show_seconds(found)} instead of {show_seconds(planned)}"
        return f"{sentence}: {who} computed and packed for {instead}"
    planned, found = max(updates, key=lambda one: (one[1] - one[0]) / more)
    if (found - planned) / more >= SHARE:
        instead = f"instead of {show_seconds(planned)}" if planned else "which the plan does not count"
        return f"{sentence}: an update took {show_seconds(found)}, {instead}"
    waits = [sum(one["waiting"][kind] for one in stages) for kind in (0, 1)]
    if (waits[1] - waits[0]) / more < SHARE:
        return f"{sentence}: computing, updates and waiting are each less than half of that"
    planned, found = map(show_seconds, waits)
    return f"{sentence}: stages waited {found} for frames instead of {planned}"
