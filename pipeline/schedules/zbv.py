"""ZB-V: two stages on a rank, laid in a V, with the backward cut into I and W.

The last stage is on the first rank, so losses come back at once: where F, I and W take equally long no rank
ever waits after its first forward, with as much in flight as 1F1B.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 6, and Pipeline Parallelism with
        Controllable Memory, NeurIPS 2024.
"""

from collections.abc import Sequence

from .instruction import Instruction
from .building_blocks import (Ascending, check_counts, check_layout, check_no_extra)


def zbv(
    stages_of_rank: Sequence[Sequence[int]], num_micro_batches: int, *, extra_in_flight: int = 0
) -> list[list[Instruction]]:
    """One program per rank, whose stages are the way down and the way up of the V.

    Raises:  ScheduleError: fewer than one micro-batch, an extra, or stages that do not lie in a V.
    """
    # rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0B0 === 3F2 3I2 3W2 0B1 === 0B2 === ...
    # rank 1   ... 1F0 2F0 1F1 2F1 2B0 === 1F2 1I0 1W0 2F2 2B1 === 1I1 2I2 1I2 1W1 2W2 1W2
    check_counts(num_micro_batches, extra_in_flight)
    check_layout("zbv", stages_of_rank)
    check_no_extra("zbv", extra_in_flight)
    num_ranks = len(stages_of_rank)
    return [
        _program(down, up, num_ranks=num_ranks, num_micro_batches=num_micro_batches)
        for down, up in stages_of_rank
    ]


def _program(down: int, up: int, *, num_ranks: int, num_micro_batches: int) -> list[Instruction]:
    rank, links = down, num_ranks - 1 - down
    work = Ascending((down, up), num_micro_batches)
    for _ in range(2 * links + 1):  # until the first comes back up
        work.take(down, "F")
    for _ in range(rank):
        work.take(up, "F")
        work.take(down, "F")
    for _ in range(links + 1):
        work.take(up, "FIW")
    for _ in range(max(num_ranks - 1, num_micro_batches - num_ranks)):
        work.take(down, "FIW")
        work.take(up, "FIW")
    for _ in range(rank):  # nothing is left to forward: gradients first, for the ranks that wait
        work.take(down, "I")
        work.take(up, "I")
    for _ in range(links + 1):
        work.take(down, "IW")
    for stage in (up, down):
        for _ in range(rank):
            work.take(stage, "W")
    return work.program
