"""What ``penstock bench pipeline schedule=...`` can race: a schedule, its weights, and its rival.

A ratio needs a neighbour: torch's own pipeline of the same schedule on the same cut where torch has one, else
our plain 1f1b on as many micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...compression.errors import ConfigError, ScheduleError
from ...pipeline.schedules import SCHEDULES

TORCH = "torch"
ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrant:
    """One row of the table.

    Attributes:
        rival: what it takes turns with: ``torch``, or the name of another entrant, which is ours.
        stream: whether its steps flow into each other, and only ``drain`` empties the pipeline.
    """

    schedule: str
    weights: str = "latest"
    stages_per_rank: int = 1
    rival: str = TORCH
    stream: bool = False


ENTRANTS = {
    "gpipe": Entrant(schedule="gpipe"),
    "1f1b": Entrant(schedule="1f1b"),
    "zb_h1": Entrant(schedule="zb_h1"),
    "gpipe_x2": Entrant(schedule="gpipe", stages_per_rank=2, rival="gpipe"),
    "1f1b_x2": Entrant(schedule="1f1b", stages_per_rank=2, rival="1f1b"),
    "interleaved": Entrant(schedule="interleaved", stages_per_rank=2),
    "zbv": Entrant(schedule="zbv", stages_per_rank=2),
    "dualpipev": Entrant(schedule="dualpipev", stages_per_rank=2),
    "double_buffered": Entrant(schedule="1f1b", weights="double_buffered", rival="1f1b", stream=True),
    "async_1f1b": Entrant(schedule="async_1f1b", weights="stashed", rival="1f1b", stream=True),
}
"""``_x2``: two neighbouring stages on each rank instead of one."""

_ENGINE_OF_STREAMS = "async_1f1b"  # where this is known, every stream runs


def entrants(asked: str | Sequence[str]) -> dict[str, Entrant]:
    """Return what ``schedule=`` asks for, by name: ``all``, a name or several; for all, those that run here.

    Raises: ConfigError: a name is unknown or there twice. ScheduleError: its schedule is not there.
    """
    if asked == ALL:
        return {name: one for name, one in ENTRANTS.items() if not _missing(one)}
    names = [asked] if isinstance(asked, str) else list(asked)
    for name in names:
        if name not in ENTRANTS:
            raise ConfigError(f"schedule={name} cannot be raced; known are {ALL}, {', '.join(ENTRANTS)}")
        if missing := _missing(ENTRANTS[name]):
            known = ", ".join(SCHEDULES)
            raise ScheduleError(f"schedule={name} needs the schedule {missing}; the known ones are {known}")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"schedule=[{','.join(names)}] must name one or more, each once")
    return {name: ENTRANTS[name] for name in names}


def left_out() -> list[str]:
    """The names that ``all`` does not stand for here, since their schedule is not there."""
    return [name for name, one in ENTRANTS.items() if _missing(one)]


def rivals(chosen: dict[str, Entrant]) -> dict[str, Entrant]:
    """Those that some of ``chosen`` take turns with and that are not among them."""
    return {
        one.rival: ENTRANTS[one.rival]
        for one in chosen.values()
        if one.rival != TORCH and one.rival not in chosen
    }


def _missing(entrant: Entrant) -> str:
    """The schedule that an entrant would need and that is not known, or nothing."""
    needed = [entrant.schedule, *([_ENGINE_OF_STREAMS] if entrant.stream else [])]
    return next((name for name in needed if name not in SCHEDULES), "")


def facts(entrant: Entrant) -> dict[str, Any]:
    """What a row of ``results.json`` says of an entrant."""
    names = ("schedule", "weights", "stages_per_rank", "rival")
    return {name: getattr(entrant, name) for name in names}
