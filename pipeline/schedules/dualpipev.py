"""DualPipeV: DualPipe cut in half: a V in which forwards of one stage alternate with backwards of the other.

A forward and a backward that stand side by side need nothing of each other, so one computes while the other's
frames travel. Its depth is that of ZB-V; a backward is cut into I and W only where a rank would wait.

Source: DeepSeek-V3 technical report, 2024, section 3.2.1 (DualPipe); Qi et al., The Cut-in-half Schedule,
        2025.
"""

from collections.abc import Sequence

from .instruction import Instruction
from .building_blocks import (Ascending, check_counts, check_layout, check_no_extra)


def dualpipev(
    stages_of_rank: Sequence[Sequence[int]], num_micro_batches: int, *, extra_in_flight: int = 0
) -> list[list[Instruction]]:
    """One program per rank, whose stages are the way down and the way up of the V.

    Raises:  ScheduleError: fewer than one micro-batch, an extra, or stages that do not lie in a V.
    """
    # r0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 === 3F2 0B0 === 3B2 === 3F3 ... 0B1 === 3B3 === 0B2 === 0B3 ===
    # r1 ... 1F0 2F0 1F1 2F1 1F2 2B0 === 2F2 1B0 === 1F3 2B1 === 2F3 1B1 === 2B2 === 1B2 === 2I3 1I3 2W3 1W3
    check_counts(num_micro_batches, extra_in_flight)
    check_layout("dualpipev", stages_of_rank)
    check_no_extra("dualpipev", extra_in_flight)
    num_ranks = len(stages_of_rank)
    return [
        _program(down, up, num_ranks=num_ranks, num_micro_batches=num_micro_batches)
        for down, up in stages_of_rank
    ]


def _program(down: int, up: int, *, num_ranks: int, num_micro_batches: int) -> list[Instruction]:
    rank, links = down, num_ranks - 1 - down
    work = Ascending((down, up), num_micro_batches)
    for _ in range(2 * links):  # until the first comes back up
        work.take(down, "F")
    for _ in range(rank + 1):
        work.take(down, "F")
        work.take(up, "F")
    for _ in range(links):
        work.take(up, "IWF")
    for _ in range(max(0, num_micro_batches - 2 * num_ranks) + rank + 1):
        work.take(down, "F")
        work.take(up, "BF")
        work.take(down, "B")
    for _ in range(links):
        work.take(up, "BF")
        work.take(down, "B")
    _drain(work, down, up, links=links, rank=rank)
    return work.program


def _drain(work: Ascending, down: int, up: int, *, links: int, rank: int) -> None:
    """The last backwards, the second half of them cut in two; W then in the order of I."""
    turns = [up, down] * (rank + 1)
    whole, waiting = turns[: rank + 1], turns[rank + 1 :]
    for stage in whole:
        work.take(stage, "B")
    for stage in waiting:
        work.take(stage, "I")
    for _ in range(links):
        work.take(waiting.pop(0), "W")
        work.take(down, "I")
        waiting.append(down)
    for stage in waiting:
        work.take(stage, "W")
