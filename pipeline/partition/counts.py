"""Numbers of stages and ranks of a plan, from what was asked for; contradictions are refused."""

from collections.abc import Sequence
from typing import Any

from ...compression.errors import PlanError
from ...compression.names import AUTO, check_name
from ...stages.plan.cluster import Cluster
from ...stages.profiling.network_profile import Profile
from ..schedules.building_blocks import layout, placed


def check_arguments(profile: object, codec: object, extra_in_flight: object, optimizer_state: object) -> None:
    """Refuse arguments of ``partition`` that are no profile, no codec, no counts."""
    if not isinstance(profile, Profile):
        raise PlanError(
            f"partition takes what measure(graph, example) returned, found a {type(profile).__name__}; "
            "measure first"
        )
    check_name(codec)
    if extra_in_flight is None:
        raise PlanError('extra_in_flight is a number or "auto", found None; leave it out for "auto"')
    if extra_in_flight != AUTO:
        check_counts(least=0, extra_in_flight=extra_in_flight)
    state = 0 if optimizer_state is None else optimizer_state
    if not isinstance(state, int | float) or not state >= 0:
        raise PlanError(
            f"optimizer_state is a number of bytes for each byte of parameters, found {state!r}; "
            "use 0 or more, or leave it out"
        )


def check_cluster(cluster: Cluster, schedule: str, **others: Any) -> None:
    """Refuse what a cluster says itself, and stages that are no chain of ranks."""
    for name, plain in (("memory", None), ("link", None), ("replicas", 1)):
        if others[name] != plain:
            raise PlanError(
                f"a cluster has the memory and links of its ranks, one a stage; leave out {name}="
            )
    if others["ranks"] not in (None, cluster.num_ranks):
        raise PlanError(
            f"the cluster has {cluster.num_ranks} ranks, found ranks={others['ranks']}; leave it out"
        )
    if layout(schedule) != "neighbours":
        raise PlanError(
            f"a cluster is a chain of ranks, and schedule={schedule} puts stages elsewhere; take a schedule "
            "of neighbours, such as 1f1b"
        )


def check_counts(*, least: int = 1, **counts: object) -> None:
    """Refuse what is no count from ``least`` on; None is not asked for."""
    for name, count in counts.items():
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < least):
            raise PlanError(f"{name} counts from {least}, found {name}={count!r}; use {least} or more")


def sizes(
    stages: int | None, ranks: int | None, given: Sequence[int] | None, schedule: str, program: Sequence[str]
) -> tuple[int, int]:
    """Return the numbers of stages and ranks, where one of them, or the cuts, may decide both."""
    if layout(schedule) == "custom":
        rank_of = placed(program)
        decided = {"stages": (stages, len(rank_of)), "ranks": (ranks, max(rank_of) + 1)}
        for name, (asked, number) in decided.items():
            if asked not in (None, number):
                raise PlanError(
                    f"the lines of a custom schedule decide its {name}, found {name}={asked} for lines with "
                    f"{number}; take {name}={number}, or other lines"
                )
        stages, ranks = len(rank_of), max(rank_of) + 1
    a_rank = _stages_a_rank(schedule)
    stages = _num_stages(stages, given, None if ranks is None else ranks * a_rank)
    ranks = stages // a_rank if ranks is None else ranks
    if ranks > stages:
        raise PlanError(
            f"every rank runs a stage, found ranks={ranks} for {stages} stages; lower ranks or raise stages"
        )
    return stages, ranks


def replica_counts(
    replicas: object, *, stages: int | None, ranks: int | None, given: Sequence[int] | None, schedule: str
) -> tuple[tuple[int, ...], int | None]:
    """Return the number of replicas of each stage, and of ranks without them, None for as many as suit.

    A number is that of every stage. ``ranks`` give the number of stages where nothing else does."""
    a_rank = _stages_a_rank(schedule)
    listed = list(replicas) if isinstance(replicas, Sequence) and not isinstance(replicas, str) else None
    for one in [replicas] if listed is None else listed:
        if type(one) is not int or one < 1:
            raise PlanError(
                f'replicas is a number from 1, a list with one for each stage, or "auto", found {replicas!r}'
            )
    if listed is not None:
        number = stages if given is None else len(given) + 1
        if not listed or number not in (None, len(listed)):
            raise PlanError(
                f"replicas={listed} has a number for each of {len(listed)} stages, found {number} stages; "
                "give as many numbers"
            )
        counts = tuple(listed)
    else:
        assert isinstance(replicas, int), "checked above"
        if stages is None and given is None and (ranks or 0) % replicas:
            raise PlanError(
                f"{replicas} replicas of every stage take a multiple of {replicas} ranks, found ranks={ranks}"
            )
        counts = (replicas,) * _num_stages(stages, given, a_rank * (ranks // replicas) if ranks else None)
    if a_rank > 1:
        if len(set(counts)) > 1 or (ranks or 0) % counts[0]:
            raise PlanError(
                f"a rank of {schedule} runs stages that have the same replicas, found ranks={ranks} for "
                f"replicas {list(counts)}; give one number, and ranks= a multiple of it"
            )
        return counts, ranks // counts[0] if ranks else None
    if ranks not in (None, sum(counts)):
        raise PlanError(
            f"every replica of a stage has a rank of its own, found ranks={ranks} for replicas "
            f"{list(counts)}; take ranks={sum(counts)}"
        )
    return counts, len(counts)


def stage_counts(
    stages: int | None, given: Sequence[int] | None, ranks: int | None, *, most: int
) -> Sequence[int]:
    """Return the numbers of stages, at most ``most``, over which the search divides ``ranks``."""
    if ranks is None:
        raise PlanError('replicas="auto" divides ranks over the stages, found none; say ranks=4')
    if stages is None and given is None:
        return range(1, min(ranks, most) + 1)
    number = _num_stages(stages, given, None)
    if number > ranks:
        raise PlanError(
            f"with replicas every stage has a rank of its own, found ranks={ranks} for {number} stages; "
            f"raise ranks to {number}, or lower stages"
        )
    return [number]


def check_asked(replicas: object, *, idle: bool, shares: object) -> None:
    """Refuse what does not suit the replicas that are asked for: ranks to leave out, or shares."""
    if isinstance(shares, str) or not isinstance(shares, Sequence):
        raise PlanError(
            f"shares are a list of whole numbers, one for each rank, found {shares!r}; give such as [3, 1]"
        )
    if idle and replicas != AUTO:
        raise PlanError(
            'idle=True leaves out ranks that replicas="auto" does not need; take "auto", or drop it'
        )
    if shares and replicas in (1, AUTO):
        raise PlanError(
            f"shares are for stages whose replicas are known, found shares {list(shares)} and "
            f"replicas={replicas}; give replicas= a number for each stage"
        )


def _stages_a_rank(schedule: str) -> int:
    return 2 if layout(schedule) in ("loop", "vee") else 1


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
