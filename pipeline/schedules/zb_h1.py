"""ZB-H1: 1F1B whose backward is cut into I and W, so that the gradient goes up early and W fills the bubble.

The bubble is a third of 1F1B's where F, I and W take equally long; no rank holds more than 1F1B's first one.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.2 (ZB-H1).
"""

from collections.abc import Sequence

from .instruction import Instruction, Op
from .building_blocks import backward, check, forward


def zb_h1(
    stages_of_rank: Sequence[Sequence[int]], num_micro_batches: int, *, extra_in_flight: int = 0
) -> list[list[Instruction]]:
    """One program per rank; W comes as many micro-batches after I as there are ranks before this one.

    Raises:  ScheduleError: fewer than one micro-batch, a negative extra, or stages that are no neighbours.
    """
    # rank 0   F0 F1 F2 .. .. B0 == F3 B1 == B2 == B3 ==
    # rank 1   .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    # rank 2   .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    check(stages_of_rank, num_micro_batches, extra_in_flight)
    num_ranks = len(stages_of_rank)
    programs = []
    for rank, stages in enumerate(stages_of_rank):
        links = num_ranks - 1 - rank
        warm = min(num_micro_batches, links * (1 + extra_in_flight))
        program = [step for index in range(warm) for step in forward(stages, index)]
        for index in range(num_micro_batches):
            if warm + index < num_micro_batches:
                program += forward(stages, warm + index)
            if rank == 0:  # nobody waits for I, and W would follow at once
                program += backward(stages, index)
                continue
            program += backward(stages, index, Op.I)
            if index >= rank:
                program += backward(stages, index - rank, Op.W)
        if rank:
            for index in range(max(0, num_micro_batches - rank), num_micro_batches):
                program += backward(stages, index, Op.W)
        programs.append(program)
    return programs
