"""A schedule that a person wrote: one line of instructions for each rank, run as it stands.

Research needs orders that no rule here has; ``verify`` refuses those that cannot run.
"""

from collections.abc import Sequence

from ...compression.errors import ScheduleError
from .instruction import Instruction
from .unit import check_counts
from .written import parse_programs


def custom(
    stages_of_rank: Sequence[Sequence[int]],
    num_micro_batches: int,
    *,
    extra_in_flight: int = 0,
    program: Sequence[str] = (),
) -> list[list[Instruction]]:
    """The programs in the lines of ``program``; a step of fewer micro-batches leaves out the others.

    Raises:  ScheduleError: no lines, words that are no instructions, U (each step ends with it), lines for
             other stages, other ranks or fewer micro-batches; an extra, which is for the lines to hold.
    """
    # "0F0 0F1 0B0 0B1"          rank 0   F0 F1 .. B0 .. B1
    # "1F0 1B0 1F1 1B1"          rank 1   .. F0 B0 F1 B1 ..
    check_counts(num_micro_batches, extra_in_flight)
    if extra_in_flight:
        raise ScheduleError(
            f"a custom schedule runs as it is written, found extra_in_flight={extra_in_flight}; leave it at 0"
        )
    if not program:
        raise ScheduleError("a custom schedule is one line for each rank, found none; give program=")
    programs = parse_programs("\n".join(program))
    found = [sorted({instruction.stage for instruction in line}) for line in programs]
    if found != [sorted(stages) for stages in stages_of_rank]:
        raise ScheduleError(
            f"a custom schedule places its own stages, found {found} in its lines and "
            f"{[list(stages) for stages in stages_of_rank]} in the plan; make the plan anew with these lines"
        )
    numbers = [_number(instruction) for line in programs for instruction in line]
    written = 1 + max(numbers)
    if written < num_micro_batches:
        raise ScheduleError(
            f"a custom schedule runs the micro-batches of its lines, found micro_batches={num_micro_batches} "
            f"and {written} in the lines; write more lines or lower micro_batches"
        )
    return [[each for each in line if _number(each) < num_micro_batches] for line in programs]


def _number(instruction: Instruction) -> int:
    if instruction.micro_batch is None:
        raise ScheduleError(
            f"every step of a custom schedule ends with the updates, found {instruction} in its lines; "
            "leave it out"
        )
    return instruction.micro_batch
