"""Which rank runs which stage under a schedule, and how many micro-batches wait on each stage.

The planner weighs both before a program exists; the tests hold them against the programs themselves.

Source: Narayanan et al., Megatron-LM, SC 2021, section 2.2 (loop); Qi et al., Zero Bubble, ICLR 2024,
        section 6 (vee).
"""

import re
from collections.abc import Sequence
from itertools import accumulate

from ...compression.errors import PlanError
from ..weights.policies import rule_named

# neighbours   rank 0: 0 1   rank 1: 2 3    the planner chooses where a rank ends
# loop         rank 0: 0 2   rank 1: 1 3
# vee          rank 0: 0 3   rank 1: 1 2
LAYOUTS = {"interleaved": "loop", "zbv": "vee", "dualpipev": "vee", "custom": "custom"}


def layout(schedule: str) -> str:
    """How a schedule lays stages on ranks: "neighbours", "loop", "vee", or "custom": its lines say it."""
    return LAYOUTS.get(schedule, "neighbours")


def placement(schedule: str, *, stages: int, ranks: int) -> tuple[int, ...]:
    """The rank of each stage; neighbours are dealt evenly here, the planner may end its ranks elsewhere.

    Raises:  PlanError: the schedule cannot place so many stages on so many ranks, or is placed by its lines.
    """
    kind = layout(schedule)
    if not 1 <= ranks <= stages:
        raise PlanError(f"every rank runs a stage, found ranks={ranks} for stages={stages}; lower ranks")
    if kind == "custom":
        placed(())
    if kind == "loop":
        if stages % ranks:
            raise PlanError(
                f"{schedule} gives every rank the same number of stages, found stages={stages} for "
                f"ranks={ranks}; take a multiple, such as stages={ranks * (stages // ranks + 1)}"
            )
        return tuple(stage % ranks for stage in range(stages))
    if kind == "vee":
        if stages != 2 * ranks:
            raise PlanError(
                f"{schedule} gives every rank two stages, found stages={stages} for ranks={ranks}; "
                f"take stages={2 * ranks}"
            )
        return tuple(min(stage, stages - 1 - stage) for stage in range(stages))
    return tuple(stage * ranks // stages for stage in range(stages))


def placed(program: Sequence[str]) -> tuple[int, ...]:
    """The rank of each stage in a custom schedule, whose lines are the ranks; raises PlanError."""
    if not program:
        raise PlanError("schedule=custom runs the lines of its program, found none; give program=")
    rank_of: dict[int, int] = {}
    for rank, line in enumerate(program):
        for stage in map(int, re.findall(r"\b([0-9]+)[FBIWU]", line)):
            if rank_of.setdefault(stage, rank) != rank:
                raise PlanError(
                    f"a stage runs on one rank, found stage {stage} on ranks {rank_of[stage]} and {rank}; "
                    "keep it in one line of the program"
                )
    missing = next(stage for stage in range(len(rank_of) + 1) if stage not in rank_of)
    if missing < max(1, len(rank_of)):
        raise PlanError(
            f"the lines of a custom schedule run every stage from 0 on, stage {missing} is in none of "
            f"{len(program)} lines; add its instructions"
        )
    return tuple(rank_of[stage] for stage in range(missing))


def in_flight(
    schedule: str, stage: int, *, ranks: Sequence[int], micro_batches: int, extra_in_flight: int = 0
) -> int:
    """The most micro-batches between F and B (or W) on a stage; ``ranks`` holds the rank of each stage.

    A schedule not known here may keep all of a step. ``async_1f1b`` streams over the ends of batches, so it
    keeps as many as there are stages to the end, whatever a batch has.
    """
    num_ranks, num_stages = max(ranks) + 1, len(ranks)
    links = num_ranks - 1 - ranks[stage]
    if schedule == "async_1f1b":
        return num_stages - stage
    if schedule == "interleaved":
        return _interleaved(stage, num_ranks, num_stages // num_ranks, micro_batches)
    most = {
        "1f1b": 1 + links * (1 + extra_in_flight),
        "zb_h1": num_ranks + links * extra_in_flight,
        "zbv": num_stages - stage,
        "dualpipev": num_stages - stage,
    }
    return min(micro_batches, most.get(schedule, micro_batches))


def old_versions(weights: str, stage: int, *, stages: int) -> int:
    """Versions of a stage's weights that are kept beside the newest one, at most."""
    return rule_named(weights).old_versions(stage, stages)


def rounds(micro_batches: int, ranks: int) -> list[int]:
    """How many micro-batches ``interleaved`` takes through a rank's stages at a time: as equal as can be.

    Never fewer than there are ranks, if a step has so many: the first of a round is back in time for the next
    stage of rank 0.
    """
    number = max(1, micro_batches // ranks)
    return [micro_batches // number + (index < micro_batches % number) for index in range(number)]


def warm_up(micro_batches: int, *, ranks: int, rank: int, stages: int) -> int:
    """Forwards before the first backward of ``interleaved`` on a rank that runs ``stages`` stages.

    All but its last stage take a round, and a micro-batch passes the later ranks forward and back.
    """
    hops = (2 if stages > 1 else 1) * (ranks - 1 - rank)
    return min((stages - 1) * max(rounds(micro_batches, ranks)) + hops, micro_batches * stages)


def _interleaved(stage: int, ranks: int, stages: int, micro_batches: int) -> int:
    """After each F of the stage: its forwards so far, less its backwards in the turns since the warm-up."""
    chunk, rank = divmod(stage, ranks)
    sizes = rounds(micro_batches, ranks)
    starts = [0, *accumulate(size * stages for size in sizes)]
    warm = warm_up(micro_batches, ranks=ranks, rank=rank, stages=stages)
    most, forwards = 0, 0
    for start, size in zip(starts, sizes, strict=False):
        for place in range(start + chunk * size, start + (chunk + 1) * size):
            forwards += 1
            turns = max(0, place - warm)
            backwards = sum(
                min(max(turns - begin - (stages - 1 - chunk) * length, 0), length)
                for begin, length in zip(starts, sizes, strict=False)
            )
            most = max(most, forwards - backwards)
    return most
