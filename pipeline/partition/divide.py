"""``replicas="auto"``: how many ranks each stage gets, and where nobody says it, how many stages there are.

Every division is cut by the same search and its step simulated, exchange of gradients included, and the
shortest is taken. Where there are too many divisions to try them all, the slowest stage gets the next rank.
Source: Narayanan et al., PipeDream, SOSP 2019, section 3.1 (the slowest stage is replicated)."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise, product
from math import comb
from typing import Any

from ...compression.errors import PlanError
from ...stages.plan.plan import Asked, Plan
from ..schedules.replicated import check_divided
from ..schedules.simulate import simulate_step
from .choose import TooSmall

MOST = 256  # divisions that are all tried: those of eight ranks over any number of stages are 128

DIVIDED = ("stages", "ranks", "replicas", "idle")  # of what ``partition`` is asked for: what is decided here

Cut = Callable[..., Plan]


def shortest(cut: Cut, asked: dict[str, Any], *, stages: Sequence[int]) -> Plan:
    """Return the plan of the shortest simulated step; of equal ones that of fewer ranks, less memory.

    Args:    cut: ``partition``; asked: all that it is asked for; stages: how many there may be.
    Raises:  PlanError: no division suits; of several that do not fit, the one that asks for the least."""
    check_divided("replicas=auto", schedule=asked["schedule"], weights=asked["weights"])
    ranks, idle, micro_batches = (asked[name] for name in ("ranks", "idle", "micro_batches"))
    rest = {name: value for name, value in asked.items() if name not in DIVIDED}
    used = range(1, ranks + 1) if idle else [ranks]
    plans: list[Plan] = []
    refused: list[PlanError] = []

    def tried(counts: Sequence[int]) -> Plan | None:
        try:
            plan = cut(replicas=list(counts), **(rest | {"looks": 0}))
        except PlanError as error:
            refused.append(error)
            return None
        if plan.num_ranks in used:
            plans.append(plan)
        return plan

    if sum(comb(total - 1, number - 1) for total in used for number in stages) <= MOST:
        for total, number in product(used, stages):
            for counts in _divisions(total, number, most=micro_batches):
                tried(counts)
    else:
        for counts in ([1] * number for number in stages):
            # One rank more for the slowest stage that can have one, and so on.
            while (plan := tried(counts)) is not None and sum(counts) < ranks and min(counts) < micro_batches:
                seconds = [(s.forward_seconds + s.backward_seconds) / len(s.ranks) for s in plan.stages]
                able = [number for number, count in enumerate(counts) if count < micro_batches]
                counts[max(able, key=seconds.__getitem__)] += 1
    if plans:
        cuts = tuple(asked["cuts"]) if asked["cuts"] else None
        divided = "auto, idle" if idle else "auto"
        request = Asked(stages=asked["stages"], ranks=ranks, cuts=cuts, divided=divided)
        best = min(plans, key=_rank)
        if asked["looks"]:
            best = cut(replicas=list(best.replicas), **rest)
        return dataclasses.replace(best, asked=request)
    if small := [error for error in refused if isinstance(error, TooSmall)]:
        raise min(small, key=lambda error: error.needed)
    if refused:
        raise refused[0]
    raise PlanError(
        f"every replica has a micro-batch at least, found ranks={ranks} for {max(stages)} stages and "
        f"micro_batches={micro_batches}; raise micro_batches, or lower ranks"
    )


def _divisions(ranks: int, stages: int, *, most: int) -> Iterator[tuple[int, ...]]:
    """Every way to give each of ``stages`` from one to ``most`` of ``ranks``."""
    for inner in combinations(range(1, ranks), stages - 1):
        counts = tuple(end - start for start, end in pairwise((0, *inner, ranks)))
        if max(counts) <= most:
            yield counts


def _rank(plan: Plan) -> tuple[float, ...]:
    """Sort key of plans; the seconds to a nanosecond, so that sums in another order are equal."""
    seconds = simulate_step(plan)[1].seconds
    memory = max(stage.held_bytes for stage in plan.stages)
    return (round(seconds, 9), plan.num_ranks, memory, plan.num_stages, *plan.replicas)
