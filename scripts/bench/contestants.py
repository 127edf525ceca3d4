"""What can be compared, by name: schedules with their weights and rivals, and policies of the weights.

A ratio needs a neighbour: torch's own pipeline of the same schedule on the same cut where torch has one, else
our plain 1f1b on as many micro-batches. Names are known before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...compression.errors import ConfigError

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


def entrants(asked: str | Sequence[str]) -> dict[str, Entrant]:
    """Return what ``schedule=`` asks for, by name: ``all``, a name or several.

    Raises: ConfigError: a name is unknown or there twice, or there is none.
    """
    names = list(ENTRANTS) if asked == ALL else [asked] if isinstance(asked, str) else list(asked)
    for name in names:
        if name not in ENTRANTS:
            raise ConfigError(f"schedule={name} cannot be raced; known are {ALL}, {', '.join(ENTRANTS)}")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"schedule=[{','.join(names)}] must name one or more, each once")
    return {name: ENTRANTS[name] for name in names}


def rivals(chosen: dict[str, Entrant]) -> dict[str, Entrant]:
    """Those that some of ``chosen`` take turns with and that are not among them."""
    wanted = [one.rival for one in chosen.values() if one.rival != TORCH and one.rival not in chosen]
    return {name: ENTRANTS[name] for name in wanted}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPolicy:
    """Which weights a micro-batch sees; ``label`` says it in the picture."""

    label: str
    schedule: str = "async_1f1b"
    weights: str = "latest"
    prediction: bool = False

    @property
    def each(self) -> bool:
        """Whether every micro-batch is an update of its own."""
        return self.schedule == "async_1f1b"


POLICIES = {
    "synchronous": TrainingPolicy(label="synchronous 1f1b", schedule="1f1b"),
    "double_buffered": TrainingPolicy(label="double buffered", schedule="1f1b", weights="double_buffered"),
    "stashed": TrainingPolicy(label="async, stashed", weights="stashed"),
    "latest": TrainingPolicy(label="async, no stashing"),
    "prediction": TrainingPolicy(label="async, no stashing, prediction", prediction=True),
}
