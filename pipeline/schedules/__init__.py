"""Schedules: which rank does what in which order, as pure functions chosen by name."""

from collections.abc import Callable, Sequence
from functools import partial

from ...compression.errors import ScheduleError
from .async_1f1b import async_1f1b
from .custom import custom
from .instruction import Instruction
from .synchronous import dualpipev, gpipe, interleaved, one_f_one_b, zb_h1, zbv

# (stages_of_rank, num_micro_batches, *, extra_in_flight=0) -> one program per rank
Schedule = Callable[..., list[list[Instruction]]]

SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
    "zbv": zbv,
    "dualpipev": dualpipev,
    "async_1f1b": async_1f1b,
    "custom": custom,
}


def schedule_named(name: str, program: Sequence[str] = ()) -> Schedule:
    """The schedule of that name; ``program`` holds the lines of a custom one; raises ScheduleError."""
    if name not in SCHEDULES:
        raise ScheduleError(f"schedule={name} is not known; the known ones are {', '.join(SCHEDULES)}")
    if not program:
        return SCHEDULES[name]
    if name != "custom":
        raise ScheduleError(
            f"program= holds the lines of a custom schedule, found {len(program)} with schedule={name}; "
            "take schedule=custom or leave the lines out"
        )
    return partial(custom, program=program)
