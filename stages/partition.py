"""partition(profile) -> Plan: where to cut, and which rank runs which stage.

The choice is exact: no legal cut has a cheaper costliest rank, and none that is as cheap sends fewer bytes.
Where a rank runs several stages, its own part is cut again so that its slowest stage is as fast as possible.

Source: the min-max recurrence of PipeDream (Narayanan et al., SOSP 2019, section 3.1), one replica per stage.
"""

from collections.abc import Sequence
from itertools import pairwise

from ..compression.choose import check_name
from ..compression.errors import PlanError
from .costs import Costs, with_margin
from .cuts import allowed_cuts, named_cuts
from .measure import Profile
from .plan import Plan
from .split import smallest_limit, split
from .units import parse_bytes, parse_rate, show_bytes


def partition(
    profile: Profile,
    *,
    stages: int | None = None,
    cuts: Sequence[str] | None = None,
    ranks: int | None = None,
    schedule: str = "1f1b",
    micro_batches: int = 8,
    extra_in_flight: int = 0,
    codec: str = "auto",
    link: float | str | None = None,
    memory: int | str | None = None,
    tier: str = "device",
) -> Plan:
    """Cut a measured model into stages, exactly: the costliest rank is as cheap as any legal cut makes it.

    A rank costs the larger of its seconds per micro-batch and the seconds its links need for the tensors over
    its cuts (unpacked, both directions at once); among equals the fewest bytes pass the cuts.

    Args:
        stages: number of stages; default: ``ranks``, or one more than ``cuts``.
        cuts: layer names or module paths to cut behind, instead of a search.
        ranks: number of processes; default: one per stage.
        link: bits per second between ranks (``"1Gbit"``); None: free.
        codec: name of a codec, or "auto": measured while it trains.
        tier: where what a forward saves waits for its backward: "device" as it is, "packed", or "host".
        memory: bytes of each rank (``"2GiB"``), kept with a margin of 5 %; None: unlimited.
    Raises:
        PlanError: the numbers contradict each other or the model, a cut is unknown or refused, nothing fits.
        CodecError: the codec is not known.
    """
    check_name(codec)
    _check_counts(stages=stages, ranks=ranks, micro_batches=micro_batches)
    if extra_in_flight < 0:
        raise PlanError(
            f"extra_in_flight counts micro-batches, found extra_in_flight={extra_in_flight}; use 0 or more"
        )
    given = named_cuts(profile, cuts) if cuts else None
    stages = _num_stages(stages, given, ranks)
    ranks = stages if ranks is None else ranks
    if ranks > stages:
        raise PlanError(
            f"every rank runs a stage, found ranks={ranks} for {stages} stages; lower ranks or raise stages"
        )
    places = allowed_cuts(profile) if given is None else given
    _check_places(profile, places, stages)
    flights = tuple(in_flight(schedule, rank, ranks, micro_batches, extra_in_flight) for rank in range(ranks))
    budget = None if memory is None else parse_bytes(memory)
    rate = None if link is None else parse_rate(link)
    costs = Costs(profile, flights=flights, rate=rate, budget=budget)
    ends, rank_ends = _choose(
        costs, [0, *places, len(profile.layers)], stages=stages, ranks=ranks, memory=memory
    )
    rank_of = tuple(sum(end <= start for end in rank_ends[1:]) for start in ends[:-1])
    return Plan(
        stages=tuple(
            costs.stage(start, end, rank) for (start, end), rank in zip(pairwise(ends), rank_of, strict=True)
        ),
        ranks=rank_of,
        schedule=schedule,
        micro_batches=micro_batches,
        extra_in_flight=extra_in_flight,
        codec=codec,
        tier=tier,
        fingerprint=profile.fingerprint,
        input_shapes=profile.input_shapes,
        input_dtypes=profile.input_dtypes,
        memory=budget,
        link=rate,
    )


def in_flight(schedule: str, rank: int, ranks: int, micro_batches: int, extra_in_flight: int) -> int:
    """The most micro-batches between F and B on a rank; a schedule not known here may keep all of them."""
    links = ranks - 1 - rank
    return min(micro_batches, 1 + links * (1 + extra_in_flight)) if schedule == "1f1b" else micro_batches


def _check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise PlanError(f"{name} counts from 1, found {name}={count}; use 1 or more")


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
            f"{stages} stages need at least as many layers, the model has {num_layers}; lower stages"
        )
    if stages - 1 > len(places):
        reason = next(iter(profile.refused.values()), "no other layer")
        raise PlanError(
            f"{stages} stages need {stages - 1} cuts, the model allows {len(places)} ({reason}); lower stages"
        )


def _choose(
    costs: Costs, points: list[int], *, stages: int, ranks: int, memory: int | str | None
) -> tuple[list[int], list[int]]:
    """Ends of the stages and of the ranks, as positions from 0 to the number of layers."""
    free = [0] * (points[-1] + 1)
    rank_ends = split(points, parts=ranks, span=costs.of_rank, edge=costs.link_times, weight=costs.cut_bytes)
    if rank_ends is None:
        needed = with_margin(int(smallest_limit(points, parts=ranks, span=costs.memory, edge=free)))
        raise PlanError(
            f"memory={memory} on each of {ranks} ranks holds no legal cut of the model; the smallest budget "
            f"that does is memory={needed} ({show_bytes(needed)}); raise memory or ranks"
        )
    ends = split(points, parts=stages, span=costs.of_stage(rank_ends), edge=free, weight=costs.cut_bytes)
    assert ends is not None, "the ranks leave every other place to cut, and there are enough"
    return ends, rank_ends
