"""The options of ``penstock bench pipeline``; they follow the rules of ``schema.py``.

They are no ``PlanConfig``: a race takes several codecs, several depths and several links at once, or several
schedules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..compression.errors import ConfigError
from .rules import count_or_auto, shown
from .schema import PlanConfig

RACED: dict[str, list[Any]] = {
    "codecs": ["raw", "zero_value", "auto"],
    "extra_in_flight": [0, "auto"],
    "links": ["loopback", "1Gbit", "100Mbit", "20Mbit", "10Mbit"],
}
"""What is raced unless told otherwise; of each the first one, where schedules are raced."""


@dataclass
class BenchPipelineConfig:
    """The options of ``penstock bench pipeline``: one job, and what is raced on it over which links.

    Attributes:
        model: the network; model._target_=my.Net for your own
        data: the samples; data._target_=my.data for your own
        optimizer: what updates the weights, on both sides
        ranks: processes on this machine, one stage each; shaped links join 2
        schedule: 1f1b: against torch's, over links; all or a list of names: against torch's and each other
        cuts: cut after these layers or modules, by hand: cuts=[layer2]; null: the planner's choice
        batch_size: samples in one step, a multiple of micro_batches
        micro_batches: parts of a batch, which follow each other through the stages
        codecs: what Penstock packs with, one contestant each; for schedules one, raw
        extra_in_flight: micro-batches in flight beyond plain 1f1b, one contestant each; auto: measured
        links: loopback, or a rate that the link between two ranks is held to; for schedules one, loopback
        delay: milliseconds a shaped link adds in each direction; needs netem
        burst: size of a shaped link's token bucket
        warmup: steps of each contestant before anything is timed
        repeats: pairs of runs, one of torch and one of a contestant; medians count
        steps: most steps of one run
        seconds: a run takes fewer steps if steps would take longer than this, at least one
        seed: decides initial weights, order of samples and random layers
        threads: threads per rank; null: the cores available divided by the ranks
        deterministic: only algorithms that repeat their bits, on both sides
        deadline: seconds that any wait between ranks may take before the bench ends
    """

    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    schedule: Any = "1f1b"
    cuts: list[str] | None = None
    batch_size: int = 128
    micro_batches: int = 8
    codecs: list[str] = field(default_factory=lambda: list(RACED["codecs"]))
    extra_in_flight: list[Any] = field(default_factory=lambda: list(RACED["extra_in_flight"]))
    links: list[Any] = field(default_factory=lambda: list(RACED["links"]))
    delay: float = 0.0
    burst: Any = "64KiB"
    warmup: int = 3
    repeats: int = 5
    steps: int = 10
    seconds: float = 4.0
    seed: int = 0
    threads: int | None = None
    deterministic: bool = True
    deadline: float = 120.0

    def __post_init__(self) -> None:
        if self.schedule != "1f1b":
            self._take_one_of_each()
        least = {"ranks": 2, "batch_size": 1, "micro_batches": 1, "warmup": 1, "repeats": 1, "steps": 1}
        for name, fewest in least.items():
            if getattr(self, name) < fewest:
                raise ConfigError(f"{name}={getattr(self, name)} must be {fewest} or more")
        for name in ("codecs", "extra_in_flight", "links"):
            listed = [str(item) for item in getattr(self, name)]
            if not listed or len(set(listed)) < len(listed):
                raise ConfigError(f"{name}={shown(listed)} must name one or more, each once")
        for extra in self.extra_in_flight:
            count_or_auto("extra_in_flight", extra)
        if not self.delay >= 0 or not self.seconds > 0 or not self.deadline > 0:
            found = f"delay={self.delay} seconds={self.seconds} deadline={self.deadline}"
            raise ConfigError(f"delay must not be below 0, seconds and deadline must be above, found {found}")
        if self.batch_size % self.micro_batches:
            raise ConfigError(
                f"batch_size={self.batch_size} is no multiple of micro_batches={self.micro_batches}, "
                "and torch's stages take micro-batches of one size; change either"
            )

    def _take_one_of_each(self) -> None:
        for name, default in RACED.items():
            if (found := getattr(self, name)) == default:
                setattr(self, name, default[:1])
            elif len(found) > 1:
                listed = shown([*map(str, found)])
                raise ConfigError(f"schedules are raced on one of {name}, found {name}={listed}; name one")

    def job(self) -> PlanConfig:
        """What is planned and trained, in the words of ``penstock plan``."""
        names = ("model", "ranks", "cuts", "batch_size", "micro_batches", "seed", "threads")
        return PlanConfig(
            **{name: getattr(self, name) for name in names},
            data=self.data | {"drop_last": True},  # every batch has the same size
            deterministic=self.deterministic,
            schedule="1f1b",
            codec="raw",  # each contestant brings its own
        )
