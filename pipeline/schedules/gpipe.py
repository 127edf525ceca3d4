"""GPipe: all forwards of a step, then all backwards.

The simplest synchronous schedule and the yardstick of the others: every micro-batch of a step is in flight.

Source: Huang et al., GPipe, NeurIPS 2019, section 2.3; here B ascends too: sums of gradients have an order.
"""

from collections.abc import Sequence

from ...compression.errors import ScheduleError
from .instruction import Instruction
from .building_blocks import backward, check, forward


def gpipe(
    stages_of_rank: Sequence[Sequence[int]], num_micro_batches: int, *, extra_in_flight: int = 0
) -> list[list[Instruction]]:
    """One program per rank: every F ascending, then every B ascending; raises ScheduleError."""
    # rank 0   F0 F1 F2 .. .. B0 B1 B2
    # rank 1   .. F0 F1 F2 B0 B1 B2 ..
    check(stages_of_rank, num_micro_batches, extra_in_flight)
    if extra_in_flight:
        raise ScheduleError(
            f"gpipe has every micro-batch in flight already, found extra_in_flight={extra_in_flight}; "
            "leave it at 0 or take schedule=1f1b"
        )
    programs = []
    for stages in stages_of_rank:
        program = [step for index in range(num_micro_batches) for step in forward(stages, index)]
        program += [step for index in range(num_micro_batches) for step in backward(stages, index)]
        programs.append(program)
    return programs
