"""Schedules: which rank does what in which order, as pure functions chosen by name."""

from collections.abc import Callable

from ...compression.errors import ScheduleError
from ..instruction import Instruction
from .gpipe import gpipe
from .one_f_one_b import one_f_one_b

# (stages_of_rank, num_micro_batches, *, extra_in_flight=0) -> one program per rank
Schedule = Callable[..., list[list[Instruction]]]

SCHEDULES: dict[str, Schedule] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def schedule_named(name: str) -> Schedule:
    """The schedule of that name; raises ScheduleError, which lists the known ones."""
    try:
        return SCHEDULES[name]
    except KeyError:
        known = ", ".join(SCHEDULES)
        raise ScheduleError(f"schedule={name} is not known; the known ones are {known}") from None
