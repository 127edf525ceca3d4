"""partition(profile) -> Plan: where to cut, and which rank runs which stage.

The choice is exact: of all legal cuts whose costliest rank is within 5 % of the cheapest possible, the one
that the fewest bytes pass. Predictions may err by 5 %, so such cuts are equals for all that is known.
Where a rank runs several stages, its own part is cut again so that its slowest stage is as fast as possible.

Source: the min-max recurrence of PipeDream (Narayanan et al., SOSP 2019, section 3.1), one replica per stage.
"""

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from ...compression.errors import PlanError
from ...compression.names import AUTO, check_name
from ...stages.planner.asked import Asked
from ...stages.planner.layer_profile import Profile
from ...stages.planner.plan import Plan
from ...stages.planner.rank_memory import Copies, copies
from ...stages.planner.rules import streams
from ...stages.units import parse_bytes, parse_rate, show_bytes
from ..schedules import schedule_named
from ..schedules.live import Programs
from ..schedules.placement import layout, placed, placement, stages_on
from .costs import Costs, with_margin
from .cuts import allowed_cuts, named_cuts
from .programs import endless_programs, most_extra, waiting
from .split import smallest_limit, split


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
    optimizer_state: float | None = None,
    tier: str = "device",
    weights: str = "latest",
    weights_tier: str = "device",
    parameters_tier: str = "device",
    weights_first: bool = False,
    recompute: bool = False,
    prediction: bool = False,
    program: Sequence[str] = (),
) -> Plan:
    """Cut a measured model into stages, exactly: of the fastest cuts, to 5 %, the one that sends least.

    A rank costs the larger of its seconds per micro-batch and the seconds its links need for the tensors over
    its cuts (unpacked, both directions at once). Of all cuts whose costliest rank is within 5 % of the
    cheapest possible, the one is chosen that the fewest bytes pass; among equals the fewest that are not
    zero, then behind what writes into what passes, then the cheapest costliest rank, then the earliest.

    Args:
        stages: default: as many as the schedule takes a rank (one or two), or one more than ``cuts``.
        cuts: layer names or module paths to cut behind, instead of a search.
        ranks: number of processes; default: as many as the stages suit.
        link: bits per second between ranks (``"1Gbit"``); None: free.
        extra_in_flight: micro-batches beyond the schedule's own; "auto": up to two, as the links ask for.
        codec: name of a codec, or "auto": measured while it trains.
        tier: where what a forward saves waits: "device" as it is, "packed", "host" or "disk".
        memory: bytes of each rank (``"2GiB"``), kept with a margin of 5 %; None: unlimited.
        optimizer_state: bytes that the optimizer keeps for each of the parameters' (Adam: 2); None: 1.
        weights: which version of the weights a micro-batch sees: "latest"; of ``async_1f1b`` "stashed" or
            "vertical_sync"; of ``1f1b`` "double_buffered".
        weights_tier: the same for a version of the weights that nothing reads right now.
        parameters_tier: where parameters and their optimizer state are while no layer reads them: the same.
        weights_first: in a backward, a layer's weight gradient comes before the gradient of its input.
        recompute: saved tensors are not kept: each stage runs a forward again ahead of its backward.
        prediction: of ``async_1f1b``: forwards run with weights expected at their backwards.
        program: the lines of ``schedule="custom"``, one per rank; they place the stages.
    Raises:
        PlanError: the numbers contradict each other or the model, a cut is unknown or refused, nothing fits.
        ScheduleError: the schedule is not known, or does not suit the counts. CodecError: no such codec.
    """
    _check_arguments(profile, codec, extra_in_flight, optimizer_state)
    _check_counts(stages=stages, ranks=ranks, micro_batches=micro_batches)
    asked = Asked(stages=stages, ranks=ranks, cuts=tuple(cuts) if cuts else None)
    given = named_cuts(profile, cuts) if cuts else None
    stages, ranks = _sizes(stages, ranks, given, schedule, program)
    places = allowed_cuts(profile) if given is None else given
    _check_places(profile, places, stages)
    fixed = None
    if layout(schedule) != "neighbours":
        fixed = placed(program) if program else placement(schedule, stages=stages, ranks=ranks)
    extra = extra_in_flight if isinstance(extra_in_flight, int) else 0
    held: Any = {"tier": tier, "weights_tier": weights_tier, "parameters_tier": parameters_tier}
    if streams(schedule, weights):  # every stage of a rank runs at its own time, so the first one counts
        each = min(micro_batches, 2 * stages + 2)  # more only repeat what these do
        make = functools.partial(endless_programs, stages_on(range(stages)), schedule, each)
    else:
        each = micro_batches
        make = functools.partial(schedule_named(schedule, program), stages_on(fixed or range(ranks)), each)

    def there(programs: Programs) -> list[Copies]:
        options = {"optimizer_state": optimizer_state, "device": profile.device, **held}
        counts = waiting(programs, weights=weights, micro_batches=each)
        return [copies(number, old_versions=old, recompute=recompute, **options) for number, old in counts]

    costs = Costs(
        profile,
        copies=there(make(extra_in_flight=extra)),
        rate=None if link is None else parse_rate(link),
        budget=None if memory is None else parse_bytes(memory),
        recompute=recompute,
    )
    ends, rank_of = _cut(costs, [0, *places, len(profile.layers)], fixed, stages, ranks, memory=memory)
    spans = [*zip(pairwise(ends), range(stages) if fixed else rank_of, rank_of, strict=True)]
    most = extra
    if extra_in_flight == AUTO:
        most = most_extra(make, lambda programs: costs.fit(spans, there(programs)))
    known = ("fingerprint", "input_shapes", "input_dtypes", "signature", "leaves")
    return Plan(
        stages=tuple(costs.stage(*span, place, ranks=(rank,), **held) for span, place, rank in spans),
        schedule=schedule,
        micro_batches=micro_batches,
        extra_in_flight=extra,
        most_extra_in_flight=most,
        codec=codec,
        memory=costs.budget,
        link=costs.rate,
        weights=weights,
        weights_first=weights_first,
        prediction=prediction,
        program=tuple(program),
        asked=asked,
        **{name: getattr(profile, name) for name in known},
    )


def _check_arguments(
    profile: object, codec: object, extra_in_flight: object, optimizer_state: object
) -> None:
    if not isinstance(profile, Profile):
        raise PlanError(
            f"partition takes what measure(graph, example) returned, found a {type(profile).__name__}; "
            "measure first"
        )
    check_name(codec)
    if extra_in_flight is None:
        raise PlanError('extra_in_flight is a number or "auto", found None; leave it out for "auto"')
    if extra_in_flight != AUTO:
        _check_counts(least=0, extra_in_flight=extra_in_flight)
    state = 0 if optimizer_state is None else optimizer_state
    if not isinstance(state, int | float) or not state >= 0:
        raise PlanError(
            f"optimizer_state is a number of bytes for each byte of parameters, found {state!r}; "
            "use 0 or more, or leave it out"
        )


def _check_counts(*, least: int = 1, **counts: object) -> None:
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < least):
            raise PlanError(f"{name} counts from {least}, found {name}={count!r}; use {least} or more")


def _sizes(
    stages: int | None, ranks: int | None, given: Sequence[int] | None, schedule: str, program: Sequence[str]
) -> tuple[int, int]:
    """How many stages and ranks there are, where one of them, or the cuts, may say it all."""
    if layout(schedule) == "custom":
        stages, ranks = _as_placed(placed(program), stages=stages, ranks=ranks)
    a_rank = 2 if layout(schedule) in ("loop", "vee") else 1
    stages = _num_stages(stages, given, None if ranks is None else ranks * a_rank)
    ranks = stages // a_rank if ranks is None else ranks
    if ranks > stages:
        raise PlanError(
            f"every rank runs a stage, found ranks={ranks} for {stages} stages; lower ranks or raise stages"
        )
    return stages, ranks


def _num_stages(stages: int | None, given: Sequence[int] | None, ranks: int | None) -> int:
    if given is not None:
        if stages not in (None, len(given) + 1):
            raise PlanError(
                f"{len(given)} cuts make {len(given) + 1} stages, found stages={stages}; leave one out"
            )
        return len(given) + 1
    number = ranks if stages is None else stages
    if number is None:
        raise PlanError("a plan needs a number of stages, of ranks, or cuts, found none; say stages=2")
    return number


def _check_places(profile: Profile, places: Sequence[int], stages: int) -> None:
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


def _as_placed(rank_of: Sequence[int], *, stages: int | None, ranks: int | None) -> tuple[int, int]:
    """The stages and ranks of the lines of a custom schedule; others that were asked for are refused."""
    found = len(rank_of), max(rank_of) + 1
    for name, asked, number in zip(("stages", "ranks"), (stages, ranks), found, strict=True):
        if asked not in (None, number):
            raise PlanError(
                f"the lines of a custom schedule decide its {name}, found {name}={asked} for lines with "
                f"{number}; take {name}={number}, or other lines"
            )
    return found


def _cut(
    costs: Costs,
    points: list[int],
    fixed: tuple[int, ...] | None,
    stages: int,
    ranks: int,
    *,
    memory: int | str | None,
) -> tuple[list[int], tuple[int, ...]]:
    """Ends of the stages, as positions from 0 to the number of layers, and the rank of each.

    Where the schedule lays them on ranks (``fixed``), the slowest stage is as fast as it can be; else ranks
    are cut first, and then the stages inside of them."""
    best = functools.partial(split, points, weight=costs.cut_weights)
    ends = best(parts=stages if fixed else ranks, span=costs.of_rank, edge=costs.link_times)
    free = [0] * (points[-1] + 1)
    if fixed:
        if ends is None or not costs.fit(zip(pairwise(ends), range(stages), fixed, strict=True)):
            raise PlanError(
                f"memory={memory} on each of {ranks} ranks does not hold the {stages} stages that the "
                "schedule lays on them; raise memory, or take a schedule of neighbours, such as 1f1b"
            )
        return ends, fixed
    if ends is None:
        needed = with_margin(int(smallest_limit(points, parts=ranks, span=costs.memory, edge=free)))
        raise PlanError(
            f"memory={memory} on each of {ranks} ranks holds no legal cut of the model; the smallest budget "
            f"that does is memory={needed} ({show_bytes(needed)}); raise memory or ranks"
        )
    inner = best(parts=stages, span=costs.of_stage(ends), edge=free)
    assert inner is not None, "the ranks leave every other place to cut, and there are enough"
    return inner, tuple(sum(end <= start for end in ends[1:]) for start in inner[:-1])
