"""Map from stages to ranks under a schedule, known before there is a program.

Source: Narayanan et al., Megatron-LM, SC 2021, section 2.2 (loop); Qi et al., Zero Bubble, ICLR 2024,
        section 6 (vee).
"""

import re
from collections.abc import Sequence

from ...compression.errors import PlanError

# neighbours   rank 0: 0 1   rank 1: 2 3    the planner chooses where a rank ends
# loop         rank 0: 0 2   rank 1: 1 3
# vee          rank 0: 0 3   rank 1: 1 2
LAYOUTS = {"interleaved": "loop", "zbv": "vee", "dualpipev": "vee", "custom": "custom"}


def layout(schedule: str) -> str:
    """Return how a schedule lays stages on ranks: "neighbours", "loop", "vee", or "custom" (by its lines)."""
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


def stages_on(rank_of: Sequence[int]) -> list[list[int]]:
    """The stages of each rank, from the rank of each stage."""
    return [[s for s, owner in enumerate(rank_of) if owner == rank] for rank in range(max(rank_of) + 1)]
