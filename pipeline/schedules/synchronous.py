"""Synchronous schedules: GPipe, 1F1B, ZB-H1, interleaved 1F1B, ZB-V and DualPipeV.

Each is a pure function of (stages_of_rank, num_micro_batches, extra_in_flight) to one program per rank, and
begins with the timeline of a small case: ``..`` is a wait, ``==`` goes on with a backward."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from .building_blocks import Ascending, backward, check, check_layout, forward
from .instruction import Instruction, Op


def gpipe(
    stages_of_rank: Sequence[Sequence[int]], num_micro_batches: int, *, extra_in_flight: int = 0
) -> list[list[Instruction]]:
    """GPipe: all forwards of a step, then all backwards, ascending too; every micro-batch is in flight.

    Source: Huang et al., GPipe, NeurIPS 2019, section 2.3."""
    # rank 0   F0 F1 F2 .. .. B0 B1 B2
    # rank 1   .. F0 F1 F2 B0 B1 B2 ..
    check(stages_of_rank, num_micro_batches, extra_in_flight, fixed="gpipe")
    return [
        [step for turn in (forward, backward) for m in range(num_micro_batches) for step in turn(stages, m)]
        for stages in stages_of_rank
    ]


def one_f_one_b(
    stages_of_rank: Sequence[Sequence[int]], num_micro_batches: int, *, extra_in_flight: int = 0
) -> list[list[Instruction]]:
    """1F1B: after a warm-up every rank alternates one backward and one forward, then drains.

    Only as many micro-batches are in flight as there are ranks from a rank to the end, and
    ``extra_in_flight`` more per link to hide the time on the wire.
    Source: Narayanan et al., PipeDream, SOSP 2019, section 3.2, flushed as in PipeDream-Flush (ICML 2021)."""
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


def zb_h1(
    stages_of_rank: Sequence[Sequence[int]], num_micro_batches: int, *, extra_in_flight: int = 0
) -> list[list[Instruction]]:
    """ZB-H1: 1F1B whose backward is cut into I and W: the gradient goes up early, and W fills the bubble.

    W comes as many micro-batches after I as there are ranks before this one. The bubble is a third of 1F1B's
    where F, I and W take equally long; no rank holds more than 1F1B's first one.
    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.2 (ZB-H1)."""
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


def interleaved(
    stages_of_rank: Sequence[Sequence[int]], num_micro_batches: int, *, extra_in_flight: int = 0
) -> list[list[Instruction]]:
    """Interleaved 1F1B: several stages on a rank, laid in a loop, and 1F1B over rounds of micro-batches.

    V stages on a rank make the bubble V times smaller than 1F1B's, for more micro-batches in flight and V
    times the messages.
    Source: Narayanan et al., Megatron-LM, SC 2021, section 2.2. There micro-batches are a multiple of ranks;
            here any number is dealt into rounds as equal as can be."""
    # rank 0   0F0 0F1 2F0 2F1 ... 2B0 ... 2B1 0B0 0B1
    # rank 1   ... 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 ...
    check_layout("interleaved", stages_of_rank, num_micro_batches, extra_in_flight)
    num_ranks = len(stages_of_rank)
    ends = list(accumulate(rounds(num_micro_batches, num_ranks), initial=0))
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
    """Sizes of the rounds of micro-batches through a rank's stages: as equal as can be, and never fewer than
    there are ranks, so that the first of a round is back in time for the next stage of rank 0."""
    number = max(1, micro_batches // ranks)
    return [micro_batches // number + (index < micro_batches % number) for index in range(number)]


def warm_up(micro_batches: int, *, ranks: int, rank: int, stages: int) -> int:
    """Forwards before the first backward of ``interleaved`` on a rank that runs ``stages`` stages: all but
    its last stage take a round, and a micro-batch passes the later ranks forward and back."""
    hops = (2 if stages > 1 else 1) * (ranks - 1 - rank)
    return min((stages - 1) * max(rounds(micro_batches, ranks)) + hops, micro_batches * stages)


def zbv(
    stages_of_rank: Sequence[Sequence[int]], num_micro_batches: int, *, extra_in_flight: int = 0
) -> list[list[Instruction]]:
    """ZB-V: two stages on a rank, the way down and the way up of a V, with the backward cut into I and W.

    Where F, I and W take equally long no rank ever waits after its first forward, with as much in flight as
    1F1B.
    Source: Qi et al., Zero Bubble, ICLR 2024, section 6, and Pipeline Parallelism with Controllable Memory,
            NeurIPS 2024."""
    # rank 0   0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0B0 === 3F2 3I2 3W2 0B1 === 0B2 === ...
    # rank 1   ... 1F0 2F0 1F1 2F1 2B0 === 1F2 1I0 1W0 2F2 2B1 === 1I1 2I2 1I2 1W1 2W2 1W2
    num_ranks, programs = len(stages_of_rank), []
    check_layout("zbv", stages_of_rank, num_micro_batches, extra_in_flight)
    for rank, (down, up) in enumerate(stages_of_rank):
        links, work = num_ranks - 1 - rank, Ascending((down, up), num_micro_batches)
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
        programs.append(work.program)
    return programs


def dualpipev(
    stages_of_rank: Sequence[Sequence[int]], num_micro_batches: int, *, extra_in_flight: int = 0
) -> list[list[Instruction]]:
    """DualPipeV: half a DualPipe: a V in which forwards of one stage alternate with backwards of the other.

    One computes while the other's frames travel. Its depth is that of ZB-V; a backward is cut into I and W
    only where a rank would wait.
    Source: DeepSeek-V3 technical report, 2024, section 3.2.1; Qi et al., The Cut-in-half Schedule, 2025."""
    # r0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 === 3F2 0B0 === 3B2 === 3F3 ... 0B1 === 3B3 === 0B2 === 0B3 ===
    # r1 ... 1F0 2F0 1F1 2F1 1F2 2B0 === 2F2 1B0 === 1F3 2B1 === 2F3 1B1 === 2B2 === 1B2 === 2I3 1I3 2W3 1W3
    num_ranks, programs = len(stages_of_rank), []
    check_layout("dualpipev", stages_of_rank, num_micro_batches, extra_in_flight)
    for rank, (down, up) in enumerate(stages_of_rank):
        links, work = num_ranks - 1 - rank, Ascending((down, up), num_micro_batches)
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
        # The last backwards, the second half of them cut in two; W then in the order of I.
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
        programs.append(work.program)
    return programs
