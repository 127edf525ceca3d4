"""Synchronous 1F1B: after a warm-up every rank alternates one backward and one forward, then drains.

The bubble is GPipe's, but only as many micro-batches are in flight as there are ranks from a rank to the end.

Source: Narayanan et al., PipeDream, SOSP 2019, section 3.2, with the flush of PipeDream-Flush (ICML 2021).
"""

from collections.abc import Sequence

from .instruction import Instruction
from .building_blocks import backward, check, forward


def one_f_one_b(
    stages_of_rank: Sequence[Sequence[int]], num_micro_batches: int, *, extra_in_flight: int = 0
) -> list[list[Instruction]]:
    """One program per rank; ``extra_in_flight`` more micro-batches per link hide the time on the wire.

    Raises:  ScheduleError: fewer than one micro-batch, a negative extra, or stages that are no neighbours.
    """
    # rank 0   F0 F1 .. B0 F2 B1 .. B2          extra_in_flight=1:   rank 0   F0 F1 F2 B0 .. B1 .. B2
    # rank 1   .. F0 B0 F1 B1 F2 B2 ..                               rank 1   .. F0 B0 F1 B1 F2 B2 ..
    check(stages_of_rank, num_micro_batches, extra_in_flight)
    num_ranks = len(stages_of_rank)
    programs = []
    for rank, stages in enumerate(stages_of_rank):
        links = num_ranks - 1 - rank
        warm = min(num_micro_batches, 1 + links + extra_in_flight * links)
        program = [step for index in range(warm) for step in forward(stages, index)]
        for index in range(num_micro_batches):
            program += backward(stages, index)
            if warm + index < num_micro_batches:
                program += forward(stages, warm + index)
        programs.append(program)
    return programs
