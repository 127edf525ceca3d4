"""Building blocks of schedules: the placement of stages on ranks, a rank's stages as one unit, checks.

Neighbouring stages on one rank run one after another, so a schedule only decides when the unit turns around.

Source: Narayanan et al., Megatron-LM, SC 2021, section 2.2 (loop); Qi et al., Zero Bubble, ICLR 2024,
        section 6 (vee)."""

import re
from collections import Counter
from collections.abc import Sequence

from ...compression.errors import PlanError, ScheduleError
from .instruction import Instruction, Op

# neighbours   rank 0: 0 1   rank 1: 2 3    the planner chooses where a rank ends
# loop         rank 0: 0 2   rank 1: 1 3
# vee          rank 0: 0 3   rank 1: 1 2
LAYOUTS = {"interleaved": "loop", "zbv": "vee", "dualpipev": "vee", "custom": "custom"}


def layout(schedule: str) -> str:
    """Return how a schedule lays stages on ranks: "neighbours", "loop", "vee", or "custom" (by its lines)."""
    return LAYOUTS.get(schedule, "neighbours")


def placement(schedule: str, *, stages: int, ranks: int) -> tuple[int, ...]:
    """The rank of each stage, raises PlanError; the planner may end ranks of neighbours elsewhere."""
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


def forward(stages: Sequence[int], micro_batch: int) -> list[Instruction]:
    """Forward of a micro-batch through the unit, first stage first: ``0F3 1F3``."""
    return [Instruction(stage, Op.F, micro_batch) for stage in stages]


def backward(stages: Sequence[int], micro_batch: int, op: Op = Op.B) -> list[Instruction]:
    """Backward, or a half of it, through the unit, last stage first: ``1B3 0B3``."""
    return [Instruction(stage, op, micro_batch) for stage in reversed(stages)]


class Ascending:
    """The program of a rank, written as ``take(stage, "FIW")``: each op with the stage's next micro-batch.

    Those beyond the last are left out. Where no other rank waits for I, I and W that meet are one B."""

    def __init__(self, stages: Sequence[int], num_micro_batches: int) -> None:
        self.program: list[Instruction] = []
        self._waited_for = [stage for stage in stages if stage > 0 and stage - 1 not in stages]
        self._num_micro_batches = num_micro_batches
        self._taken: Counter[tuple[int, Op]] = Counter()

    def take(self, stage: int, ops: str) -> None:
        """Append the ops of a stage, one after another; B counts as I and as W."""
        for op in map(Op, ops):
            index = self._taken[stage, Op.I if op is Op.B else op]
            self._taken.update((stage, half) for half in ((Op.I, Op.W) if op is Op.B else (op,)))
            if index >= self._num_micro_batches:
                continue
            inputs = Instruction(stage, Op.I, index)
            if op is Op.W and self.program[-1] == inputs and stage not in self._waited_for:
                self.program[-1] = Instruction(stage, Op.B, index)
            else:
                self.program.append(Instruction(stage, op, index))


def check(
    stages_of_rank: Sequence[Sequence[int]], num_micro_batches: int, extra_in_flight: int, *, fixed: str = ""
) -> None:
    """Refuse what no schedule of neighbours can run, and what ``check_counts`` does; raises ScheduleError."""
    check_counts(num_micro_batches, extra_in_flight, fixed=fixed)
    expected = 0
    for rank, stages in enumerate(stages_of_rank):
        if not stages or list(stages) != list(range(expected, expected + len(stages))):
            raise ScheduleError(
                f"ranks take neighbouring stages in ascending order, "
                f"found stages {list(stages)} on rank {rank} where stage {expected} comes next; "
                "give each rank one or more stages in that order"
            )
        expected += len(stages)


def check_counts(num_micro_batches: int, extra_in_flight: int, *, fixed: str = "") -> None:
    """Refuse counts that no schedule runs, and any extra where ``fixed`` names one whose order is fixed."""
    if num_micro_batches < 1:
        raise ScheduleError(
            f"a step needs at least one micro-batch, found micro_batches={num_micro_batches}; use 1 or more"
        )
    if extra_in_flight < 0:
        raise ScheduleError(
            f"extra_in_flight counts micro-batches beyond the schedule's own, found "
            f"extra_in_flight={extra_in_flight}; use 0 or more"
        )
    if fixed and extra_in_flight:
        raise ScheduleError(
            f"{fixed} has as many micro-batches in flight as its order takes, found "
            f"extra_in_flight={extra_in_flight}; leave it at 0 or take schedule=1f1b"
        )


def check_layout(
    schedule: str, stages_of_rank: Sequence[Sequence[int]], num_micro_batches: int, extra_in_flight: int
) -> None:
    """Refuse stages that do not lie as the schedule needs them (loop, vee), and what ``check_counts``
    does."""
    check_counts(num_micro_batches, extra_in_flight, fixed=schedule)
    try:
        rank_of = placement(schedule, stages=sum(map(len, stages_of_rank)), ranks=len(stages_of_rank))
    except PlanError as error:
        raise ScheduleError(str(error)) from None
    for rank, (stages, wanted) in enumerate(zip(stages_of_rank, stages_on(rank_of), strict=True)):
        if list(stages) != wanted:
            raise ScheduleError(
                f"{schedule} runs stages {wanted} on rank {rank}, found stages {list(stages)} there; "
                f"give rank {rank} the stages of the schedule"
            )
