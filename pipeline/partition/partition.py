"""partition(profile) -> Plan: where to cut, and which rank runs which stage.

The search is exact: of all legal cuts whose costliest rank is within 5 % of the cheapest possible, the one
that the fewest bytes pass. Predictions may err by 5 %, so such cuts are equals for all that is known.
Where a rank runs several stages, its own part is cut again so that its slowest stage is as fast as possible,
or, where frames between them exceed a budget, so that the fewest bytes pass: that choice is not exact.
Another cut takes its place if a simulated step is shorter by more than 5 % with it (refine.py).

Source: the min-max recurrence of PipeDream (Narayanan et al., SOSP 2019, section 3.1), one replica per stage.
"""

import contextlib
import copy
import difflib
import functools
import itertools
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ...compression.errors import PlanError
from ...compression.names import AUTO, HOST
from ...stages.plan.cluster import Cluster
from ...stages.plan.memory_model import Copies, copies, exchanges
from ...stages.plan.plan import Asked, Plan
from ...stages.plan.plan_stage import counts_of, split_shares
from ...stages.plan.validation import STREAM, check_replicas, check_statistics, streams
from ...stages.profiling.network_profile import Profile
from ...stages.tracing.layers import part_of
from ...stages.units import parse_bytes, parse_rate, show_bytes
from ..schedules import schedule_named
from ..schedules.building_blocks import layout, placed, placement, stages_on
from ..schedules.instruction import Programs
from ..schedules.replicated import DEEPENED, dealt, endless_programs, most_extra, replicated, waiting
from ..schedules.simulate import simulate_step
from .choose import TooSmall, cheapest, is_open
from .costs import Costs, Placed
from .counts import (
    check_arguments,
    check_asked,
    check_cluster,
    check_counts,
    replica_counts,
    sizes,
    stage_counts,
)
from .divide import shortest
from .refine import LOOKS, LOOSER, refined
from .split import TOLERANCE, smallest_limit, split


def _allowed_cuts(profile: Profile) -> list[int]:
    """Positions where the model may be cut, ascending; position p is in front of layer p."""
    return [p for p in range(1, len(profile.layers)) if p - 1 not in profile.refused]


def _named_cuts(profile: Profile, cuts: Sequence[str]) -> list[int]:
    """Positions of the cuts behind these layers or modules."""
    if isinstance(cuts, str):
        raise PlanError(f"cuts is a list of names, found {cuts!r}; write [{cuts!r}]")
    positions = [_position(profile, name) for name in cuts]
    for (before, name), (first, second) in zip(pairwise(cuts), pairwise(positions), strict=True):
        if first == second:
            raise PlanError(
                f"cuts {before} and {name} are one place, behind {profile.layers[first - 1].name}; drop one"
            )
        if first > second:
            raise PlanError(f"cuts follow the order of the layers, found {name} behind {before}; swap them")
    return positions


def _named_parts(profile: Profile, paths: Sequence[str]) -> tuple[str, ...]:
    """Check the paths of parts that run again."""
    if isinstance(paths, str):
        raise PlanError(
            f"recompute is true, false or a list of module paths, found {paths!r}; write [{paths!r}]"
        )
    if not paths:
        raise PlanError("recompute names one module at least, found []; take recompute=false for none")
    for path in paths:
        if not path or all(part_of(layer.module, [path]) is None for layer in profile.layers):
            raise PlanError(f"recompute names paths of modules, found {path!r}; {_close(path, profile)}")
    return tuple(paths)


def _close(name: object, profile: Profile) -> str:
    """Say which names of layers and modules are near to a wrong one."""
    names = [layer.name for layer in profile.layers]
    parts = (itertools.accumulate(layer.module.split("."), "{}.{}".format) for layer in profile.layers)
    known = dict.fromkeys([*names, *filter(None, itertools.chain(*parts))])  # of a.b.c: a, a.b, a.b.c
    close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.4)
    return f"close ones are {', '.join(close)}" if close else f"the layers run from {names[0]} to {names[-1]}"


def _position(profile: Profile, name: str) -> int:
    # 1. the last layer of that name, or of that module
    names = [layer.name for layer in profile.layers]
    inside = [i for i, layer in enumerate(profile.layers) if f"{layer.module}.".startswith(f"{name}.")]
    if name not in names and not (inside and name):
        raise PlanError(f"a cut is the name of a layer or module, found {name}; {_close(name, profile)}")
    index = names.index(name) if name in names else inside[-1]
    # 2. a cut behind it
    if index == len(names) - 1:
        raise PlanError(
            f"a cut has a layer behind it, found {name}, which ends with the last layer {names[index]}; cut "
            "earlier"
        )
    if index in profile.refused:
        nearest = sorted(_allowed_cuts(profile), key=lambda position: abs(position - 1 - index))[:2]
        allowed = " or ".join(names[position - 1] for position in nearest) or "nowhere"
        raise PlanError(
            f"the model cannot be cut behind {names[index]} ({name}): {profile.refused[index]}; nearest: "
            f"{allowed}"
        )
    return index + 1


def partition(
    profile: Profile,
    *,
    stages: int | None = None,
    cuts: Sequence[str] | None = None,
    ranks: int | None = None,
    schedule: str = "1f1b",
    micro_batches: int = 8,
    extra_in_flight: int | str = AUTO,
    codec: str = "auto",
    link: float | str | None = None,
    memory: int | str | None = None,
    cluster: Cluster | None = None,
    optimizer_state: float | None = None,
    tier: str = "device",
    weights: str = "latest",
    weights_tier: str = "device",
    parameters_tier: str = "device",
    prefetches: bool | None = None,
    by_element: bool = False,
    weights_first: bool = False,
    recompute: bool | Sequence[str] = False,
    prediction: bool = False,
    error_feedback: bool = False,
    program: Sequence[str] = (),
    replicas: int | str | Sequence[int] = 1,
    exact: bool = False,
    sharded: bool = False,
    owner: str = "spread",
    shares: Sequence[int] = (),
    idle: bool = False,
    disk_rate: float | None = None,
    update_seconds: float | None = None,
    looks: int = LOOKS,
) -> Plan:
    """Cut a measured model into stages: of the fastest cuts, to 5 %, the one that sends least.

    A rank costs the larger of its seconds per micro-batch and the seconds its links need for the tensors over
    its cuts: packed, with the seconds that takes, where ``measure`` tried the codecs (both directions at
    once). Of all cuts whose costliest rank is within 5 % of the
    cheapest possible, the one is chosen that the fewest bytes pass; among equals the fewest that are not
    zero, then behind what writes into what passes, then the cheapest costliest rank, then the earliest.
    Where the simulation of a step finds a cut that shortens it by more than 5 %, that one is chosen instead.

    Args:
        stages: default: as many as the schedule takes a rank (one or two), or one more than ``cuts``.
        cuts: layer names or module paths to cut behind, instead of a search.
        ranks: number of processes; default: as many as the stages suit.
        link: bits per second between ranks (``"1Gbit"``); None: free.
        extra_in_flight: micro-batches beyond the schedule's own; "auto": up to two, as the links ask for.
        codec: name of a codec, or "auto": measured while it trains.
        tier: where what a forward saves waits: "device" as it is, "packed", "host" or "disk".
        memory: bytes of each rank (``"2GiB"``), kept with a margin of 5 %; None: unlimited.
        cluster: ranks that differ in speed, memory and links, instead of ``ranks``, ``memory`` and ``link``.
        optimizer_state: bytes that the optimizer keeps for each of the parameters' (Adam: 2); None: 1.
        weights: which version of the weights a micro-batch sees: "latest"; of ``async_1f1b`` "stashed" or
            "vertical_sync"; of ``1f1b`` "double_buffered".
        weights_tier: the tier of a version of the weights that nothing reads right now.
        parameters_tier: that of parameters and their optimizer state while no layer reads them.
        prefetches: parameters in a tier come ahead of their layer, else one layer's at a time; None: as the
            memory allows.
        by_element: the optimizer updates each element by itself, so that a tier updates in pieces.
        weights_first: in a backward, a layer's weight gradient comes before the gradient of its input.
        recompute: saved tensors are not kept: each stage runs a forward again ahead of its backward; or the
            layers of each of these parts run again: module paths, also as ``["layer3", "encoder.*"]``.
        prediction: of ``async_1f1b``: forwards run with weights expected at their backwards.
        error_feedback: of "double_buffered": an update makes up for the delay of the one before.
        program: the lines of ``schedule="custom"``, one per rank; they place the stages.
        replicas: ranks of every stage, or of each ([2, 1]), which take its micro-batches in turn; "auto": all
            ``ranks`` are dealt so that the simulated step is shortest, over ``stages`` if given.
        exact: replicas add up gradients in the plain loop's order, for its bits.
        sharded: each replica updates some parameters, and keeps their state; so does a ``parameters_tier``.
        owner: the replica that updates a parameter then: "spread", by bytes, or "first", all of them.
        shares: by weight, how much of its stage each rank takes ([3, 1]: three micro-batches of four).
        idle: of "auto": ranks that would not shorten the simulated step are left out.
        disk_rate: bytes per second of the disk, for "auto"; 0: none may be used, None: not measured.
        update_seconds: of an update, for each byte of parameters; None: updates take no time.
        looks: cuts near the exact one of which a step is simulated; 0: the exact one is taken.
    Raises:
        PlanError: the numbers contradict each other or the model, a cut is unknown or refused, nothing fits.
        ScheduleError: the schedule is not known, or does not suit the counts. CodecError: no such codec."""
    asked_for = dict(locals())  # ahead of any other name
    # 1. what the request leaves open: tiers and replicas are searched by calls of this function
    check_arguments(profile, codec, extra_in_flight, optimizer_state)
    check_counts(least=0, looks=looks)
    if cluster is not None:
        check_cluster(cluster, schedule, ranks=ranks, replicas=replicas, memory=memory, link=link)
        asked_for["ranks"] = ranks = cluster.num_ranks
    left_open = ("memory", "tier", "parameters_tier", "recompute", "prefetches", "looks")
    open_ = {name: asked_for.pop(name) for name in left_open}
    limited = memory is not None or (cluster is not None and any(cluster.memory))
    if is_open(memory, limited=limited, tier=tier, parameters_tier=parameters_tier, prefetches=prefetches):
        return cheapest(
            functools.partial(partition, **asked_for), profile, limited=limited, disk_rate=disk_rate, **open_
        )
    check_counts(stages=stages, ranks=ranks, micro_batches=micro_batches)
    given = _named_cuts(profile, cuts) if cuts else None
    recompute = recompute if isinstance(recompute, bool) else _named_parts(profile, recompute)
    check_asked(replicas, idle=idle, shares=shares)
    if replicas == AUTO:
        numbers = stage_counts(stages, given, ranks, most=len(_allowed_cuts(profile)) + 1)
        return shortest(partition, {**asked_for, **open_}, stages=numbers)
    # 2. numbers of stages, ranks and replicas, and the places to cut
    several: tuple[int, ...] = ()
    ranks_of: list[range] = []  # of each stage, where there are replicas
    weighed: tuple[tuple[int, ...], ...] = ()
    asked = {"stages": stages, "ranks": ranks, "cuts": tuple(cuts) if cuts else None}
    if replicas != 1:
        several, ranks = replica_counts(replicas, stages=stages, ranks=ranks, given=given, schedule=schedule)
        stages = len(several)
        sharded = sharded or (max(several) > 1 and parameters_tier != "device")
    stages, ranks = sizes(stages, ranks, given, schedule, program)
    places = _allowed_cuts(profile) if given is None else given
    num_layers = len(profile.layers)
    if stages > num_layers:
        raise PlanError(
            f"{stages} stages need at least as many layers, the model has {num_layers}; lower stages or ranks"
        )
    if stages - 1 > len(places):
        reason = next(iter(profile.refused.values()), "no other layer")
        raise PlanError(
            f"{stages} stages need {stages - 1} cuts, the model allows {len(places)} ({reason}); lower stages"
        )
    fixed = None
    if layout(schedule) != "neighbours":
        fixed = placed(program) if program else placement(schedule, stages=stages, ranks=ranks)
    if several:
        groups = dealt([several[0]] * ranks if fixed else several)
        ranks_of = [groups[place] for place in fixed or range(stages)]
        check_replicas(ranks_of, schedule=schedule, weights=weights, micro_batches=micro_batches)
        if recompute and max(several) > 1:
            check_statistics(profile.written)
        weighed = split_shares(shares, ranks_of) if shares else ((),) * stages
    # 3. the schedule's programs, which say what each rank holds at once
    extra = extra_in_flight if isinstance(extra_in_flight, int) else 0
    held: Any = {"tier": tier, "weights_tier": weights_tier, "parameters_tier": parameters_tier}
    if streams(schedule, weights):  # every stage of a rank runs at its own time, so the first one counts
        each = min(micro_batches, 2 * stages + 2)  # more only repeat what these do
        make = functools.partial(endless_programs, stages_on(range(stages)), schedule, each)
    else:
        each = micro_batches
        one, laid = schedule_named(schedule, program), stages_on(fixed or range(ranks))
        if several:
            one = replicated(one, ranks_of, shares=weighed, deepens=schedule in DEEPENED)
            number = 1 + max(map(max, ranks_of))
            laid = [[s for s, own in enumerate(ranks_of) if rank in own] for rank in range(number)]
        make = functools.partial(one, laid, each)

    def there(programs: Programs) -> list[Copies]:
        options = {"device": profile.device, "recompute": recompute, "by_element": by_element, **held}
        counts = waiting(programs, weights=weights, micro_batches=each)
        dealing = zip(several, weighed, strict=True) if several else [(1, ())] * len(counts)
        state = (1.0 if optimizer_state is None else optimizer_state) + error_feedback
        return [
            copies(
                number,
                old_versions=old,
                exchanged=exchanges(counts_of(own or (1,) * n, micro_batches), exact=exact),
                optimizer_state=state / (n if sharded and owner == "spread" else 1),
                **options,
            )
            for (number, old), (n, own) in zip(counts, dealing, strict=True)
        ]

    # 4. the exact search
    costs = Costs(
        profile,
        copies=there(make(extra_in_flight=extra)),
        rate=None if link is None else parse_rate(link),
        budget=None if memory is None else parse_bytes(memory),
        recompute=recompute,
        prefetches=prefetches is not False,
        replicas=several,
        cluster=cluster,
        updates=(update_seconds or 0.0) * (profile.device == HOST),  # where it was measured
        each=1 if schedule == STREAM else micro_batches,
        sharded=sharded and owner == "spread",
        codec=codec,
    )

    cut = functools.partial(_cut, costs, [0, *places, num_layers], fixed, stages, ranks, memory=memory)
    ends, rank_of = cut()

    def spans_of(ends: Sequence[int]) -> list[Placed]:
        return [*zip(pairwise(ends), range(stages) if fixed else rank_of, rank_of, strict=True)]

    def plan_with(ends: Sequence[int]) -> Plan:
        """The plan with these cuts: what memory is left over is for micro-batches, resident parameters."""
        spans, most = spans_of(ends), extra
        if extra_in_flight == AUTO:
            most = most_extra(make, lambda programs: costs.fit(spans, there(programs)))
        most_there = there(make(extra_in_flight=most))
        staying, frames = costs.staying(spans, most_there), costs.frames(spans, most_there)
        known = ("fingerprint", "input_shapes", "input_dtypes", "signature", "leaves", "graph")
        plan = Plan(
            stages=tuple(
                costs.stage(
                    *span,
                    place,
                    staying=stay,
                    frames=size,
                    ranks=tuple(ranks_of[place]) if several else (rank,),
                    **held,
                )
                for (span, place, rank), stay, size in zip(spans, staying, frames, strict=True)
            ),
            schedule=schedule,
            micro_batches=micro_batches,
            extra_in_flight=extra,
            most_extra_in_flight=most,
            codec=codec,
            memory=None if cluster else costs.budget,
            link=costs.rate,
            cluster=cluster,
            weights=weights,
            weights_first=weights_first,
            prediction=prediction,
            error_feedback=error_feedback,
            program=tuple(program),
            exact=exact,
            sharded=sharded,
            owners=owner,
            asked=Asked(**asked, replicas=several or None),
            **{name: getattr(profile, name) for name in known},
        )
        return plan.with_shares(weighed) if weighed else plan

    def seconds(cuts: Sequence[int]) -> float:
        ends = [0, *cuts, num_layers]
        return simulate_step(plan_with(ends))[1].seconds if costs.fit(spans_of(ends)) else math.inf

    # 5. other cuts, by the simulation
    if looks and given is None and stages > 1 and not (program or streams(schedule, weights)):
        starts = [tuple(ends[1:-1])]
        for percent in LOOSER:
            with contextlib.suppress(TooSmall):  # the stages of looser ranks may hold more
                starts.append(tuple(cut(tolerance=percent)[0][1:-1]))
        ends = [0, *refined(starts, places, seconds, looks=looks), num_layers]
    return plan_with(ends)


def _cut(
    costs: Costs,
    points: list[int],
    fixed: tuple[int, ...] | None,
    stages: int,
    ranks: int,
    *,
    memory: int | str | None,
    tolerance: int = TOLERANCE,
) -> tuple[list[int], tuple[int, ...]]:
    """Return the ends of the stages, as positions from 0 to the number of layers, and the rank of each.

    Where the schedule puts stages on ranks (``fixed``), the slowest stage is made as fast as it can be; else
    ranks are cut first, then the stages inside them."""
    best = functools.partial(split, points, weight=costs.cut_weights, tolerance=tolerance)
    parts, least = stages if fixed else ranks, costs.least_of_rank
    ends = best(parts=parts, span=costs.of_rank, edge=costs.link_times, least=least)
    free = [[0] * (points[-1] + 1)] * stages
    if fixed:
        if ends is None or not costs.fit([*zip(pairwise(ends), range(stages), fixed, strict=True)]):
            free_costs = copy.copy(costs)
            free_costs.budget = None
            unlimited = best(parts=stages, span=free_costs.of_rank, edge=costs.link_times)
            assert unlimited is not None, "there are enough places to cut"
            needed = costs.needed([*zip(pairwise(unlimited), range(stages), fixed, strict=True)])
            needed = max(needed, *(costs.required(*ends, n) for n, ends in enumerate(pairwise(unlimited))))
            raise TooSmall(
                f"memory={memory} on each of {ranks} ranks does not hold the {stages} stages that the "
                f"schedule lays on them; a budget that does is memory={needed} ({show_bytes(needed)}); raise "
                "memory, or take a schedule of neighbours, such as 1f1b",
                needed,
                least=False,
            )
        return ends, fixed

    def with_stages(ends: list[int]) -> tuple[list[int], tuple[int, ...], int]:
        """Cut each rank into its stages, as fast as they can be, or where the fewest bytes pass if only that
        keeps to the budget; return the budget that this needs, too."""
        found = []
        for timed in (True, False):
            inner = best(parts=stages, span=costs.of_stage(ends, timed=timed), edge=free)
            assert inner is not None, "the ranks leave every other place to cut, and there are enough"
            rank_of = tuple(sum(end <= start for end in ends[1:]) for start in inner[:-1])
            needed = costs.needed_with_frames(ends, [*zip(pairwise(inner), rank_of, rank_of, strict=True)])
            found.append((inner, rank_of, needed))
            if costs.budget is None or needed <= costs.budget:
                break
        return min(found, key=lambda one: one[2])

    if ends is not None:
        inner, rank_of, needed = with_stages(ends)
        if costs.budget is None or needed <= costs.budget:
            return inner, rank_of
    # The cut that needs least: it fits, or its budget does.
    tight = copy.copy(costs)
    tight.budget = int(
        smallest_limit(points, parts=ranks, span=costs.required, edge=free, least=costs.least_required)
    )
    ends = best(parts=parts, span=tight.of_rank, edge=costs.link_times, least=tight.least_of_rank)
    assert ends is not None, "some cut needs no more than the least"
    inner, rank_of, needed = with_stages(ends)
    if costs.budget is not None and needed > costs.budget:
        budget = "the smallest budget" if needed == tight.budget else "a budget"
        sentence = (
            f"memory={memory} on each of {ranks} ranks holds no legal cut of the model; {budget} that does "
            f"is memory={needed} ({show_bytes(needed)}); raise memory or ranks"
        )
        if costs.most:
            sentence = (
                f"the memory of the cluster, {show_bytes(costs.most)} on its largest rank, holds no "
                f"legal cut of the model; {needed / costs.most:.3g} times as much on each rank does; "
                "raise it, or add a device"
            )
        raise TooSmall(
            sentence,
            needed,
            least=needed == tight.budget,
        )
    return inner, rank_of
