"""Interleaved 1F1B: several stages on a rank, laid in a loop, and 1F1B over all of them.

A rank's turn is a part as long as one stage, so ranks start and end earlier: V stages on a rank make the
bubble V times smaller than 1F1B's, for more micro-batches in flight and V times the messages.

Source: Narayanan et al., Megatron-LM, SC 2021, section 2.2. There micro-batches are a multiple of ranks; here
        any number is dealt into rounds as equal as can be.
"""

from collections.abc import Sequence
from itertools import pairwise

from .instruction import Instruction
from .building_blocks import (backward, check_counts, check_layout, check_no_extra, forward)


def interleaved(
    stages_of_rank: Sequence[Sequence[int]], num_micro_batches: int, *, extra_in_flight: int = 0
) -> list[list[Instruction]]:
    """One program per rank, which takes a round of micro-batches through each of its stages in turn.

    Raises:  ScheduleError: fewer than one micro-batch, an extra, or stages that do not lie in a loop.
    """
    # rank 0   0F0 0F1 2F0 2F1 ... 2B0 ... 2B1 0B0 0B1
    # rank 1   ... 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 ...
    check_counts(num_micro_batches, extra_in_flight)
    check_layout("interleaved", stages_of_rank)
    check_no_extra("interleaved", extra_in_flight)
    num_ranks = len(stages_of_rank)
    ends = [0]
    for size in rounds(num_micro_batches, num_ranks):
        ends.append(ends[-1] + size)
    programs = []
    for rank, stages in enumerate(stages_of_rank):
        turns = [range(*pair) for pair in pairwise(ends)]
        forwards = [forward([s], m)[0] for turn in turns for s in stages for m in turn]
        backwards = [backward([s], m)[0] for turn in turns for s in reversed(stages) for m in turn]
        warm = warm_up(num_micro_batches, ranks=num_ranks, rank=rank, stages=len(stages))
        program = forwards[:warm]
        for place, instruction in enumerate(backwards, start=warm):
            program += [*forwards[place : place + 1], instruction]
        programs.append(program)
    return programs


def rounds(micro_batches: int, ranks: int) -> list[int]:
    """Sizes of the rounds of micro-batches through a rank's stages: as equal as can be.

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
