"""A schedule that a person wrote: one line of instructions for each rank, run as it stands.

Research needs orders that no rule here has; ``verify`` refuses those that cannot run.
"""

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path

from ...compression.errors import ScheduleError
from .building_blocks import check_counts
from .instruction import Instruction, parse, parse_program, show

_TOGETHER = re.compile(r"\(([^()]*)\)OVERLAP_F_B")  # torch may run these side by side; here one by one
_DERIVED = re.compile(  # what the engine does of its own accord
    r"[0-9]+(?:(?:WAIT_)?SEND_[FB]|RECV_[FB]|UNSHARD|RESHARD|(?:WAIT_)?REDUCE_GRAD)[0-9]*"
)


def parse_programs(text: str) -> list[list[Instruction]]:
    """Read lines of instructions; what follows a ``#`` and empty lines are skipped. Raises ScheduleError."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [parse_program(line) for line in lines if line]


def parse_csv(text: str) -> list[list[Instruction]]:
    """Read a CSV, ours or torch's; empty cells and communication are skipped, groups taken apart."""
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text))]
    except csv.Error as error:
        raise ScheduleError(f"a schedule is a table of instructions, cannot read it: {error}") from None
    return [[instruction for cell in row for instruction in _cell(cell)] for row in rows if any(row)]


def load_program(path: str | Path) -> tuple[str, ...]:
    """The lines of a custom schedule, as a plan keeps them, from a ``.csv`` or a text file; raises
    ScheduleError, which names the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ScheduleError(
            f"{path} cannot be read: {reason}; a custom schedule is a file of text or CSV"
        ) from None
    try:
        programs = parse_csv(text) if Path(path).suffix.lower() == ".csv" else parse_programs(text)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    if not any(programs):
        raise ScheduleError(
            f"{path} holds no instructions; a custom schedule is a line for each rank, such as 0F0 0B0"
        )
    return tuple(map(show, programs))


def _cell(text: str) -> list[Instruction]:
    if group := _TOGETHER.fullmatch(text):
        return [instruction for part in group[1].split(";") for instruction in _cell(part.strip())]
    if not text or _DERIVED.fullmatch(text):
        return []
    return [parse(text)]


def custom(
    stages_of_rank: Sequence[Sequence[int]],
    num_micro_batches: int,
    *,
    extra_in_flight: int = 0,
    program: Sequence[str] = (),
) -> list[list[Instruction]]:
    """The programs in the lines of ``program``; a step of fewer micro-batches leaves out the others."""
    # "0F0 0F1 0B0 0B1"          rank 0   F0 F1 .. B0 .. B1
    # "1F0 1B0 1F1 1B1"          rank 1   .. F0 B0 F1 B1 ..
    check_counts(num_micro_batches, extra_in_flight, fixed="custom")
    if not program:
        raise ScheduleError("a custom schedule is one line for each rank, found none; give program=")
    programs = parse_programs("\n".join(program))
    found = [sorted({instruction.stage for instruction in line}) for line in programs]
    if found != [sorted(stages) for stages in stages_of_rank]:
        raise ScheduleError(
            f"a custom schedule places its own stages, found {found} in its lines and "
            f"{[list(stages) for stages in stages_of_rank]} in the plan; make the plan anew with these lines"
        )
    numbers = [instruction.micro_batch for line in programs for instruction in line]
    if None in numbers:
        update = next(each for line in programs for each in line if each.micro_batch is None)
        raise ScheduleError(
            f"every step of a custom schedule ends with the updates, found {update} in its lines; "
            "leave it out"
        )
    written = 1 + max(filter(None, numbers), default=0)
    if written < num_micro_batches:
        raise ScheduleError(
            f"a custom schedule runs the micro-batches of its lines, found micro_batches={num_micro_batches} "
            f"and {written} in the lines; write more lines or lower micro_batches"
        )
    return [[each for each in line if (each.micro_batch or 0) < num_micro_batches] for line in programs]
