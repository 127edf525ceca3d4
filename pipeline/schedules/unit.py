"""The stages of one rank as one unit: what every schedule shares.

Neighbouring stages on one rank run one after another, so a schedule only decides when the unit turns around.
"""

from collections.abc import Sequence

from ...compression.errors import ScheduleError
from ..instruction import Instruction, Op


def forward(stages: Sequence[int], micro_batch: int) -> list[Instruction]:
    """Forward of a micro-batch through the unit, first stage first: ``0F3 1F3``."""
    return [Instruction(stage, Op.F, micro_batch) for stage in stages]


def backward(stages: Sequence[int], micro_batch: int) -> list[Instruction]:
    """Backward of a micro-batch through the unit, last stage first: ``1B3 0B3``."""
    return [Instruction(stage, Op.B, micro_batch) for stage in reversed(stages)]


def check(stages_of_rank: Sequence[Sequence[int]], num_micro_batches: int, extra_in_flight: int) -> None:
    """Refuse what no schedule can run; raises ScheduleError naming the value."""
    if num_micro_batches < 1:
        raise ScheduleError(
            f"a step needs at least one micro-batch, found micro_batches={num_micro_batches}; use 1 or more"
        )
    if extra_in_flight < 0:
        raise ScheduleError(
            f"extra_in_flight counts micro-batches beyond the schedule's own, found "
            f"extra_in_flight={extra_in_flight}; use 0 or more"
        )
    expected = 0
    for rank, stages in enumerate(stages_of_rank):
        if not stages or list(stages) != list(range(expected, expected + len(stages))):
            raise ScheduleError(
                f"ranks take neighbouring stages in ascending order, "
                f"found stages {list(stages)} on rank {rank} where stage {expected} comes next; "
                "give each rank one or more stages in that order"
            )
        expected += len(stages)
