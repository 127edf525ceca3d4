"""The options of ``penstock bench codecs``; they follow the rules of ``schema.py``.

They are those of a plan and a few more, since what is measured may be what crosses the cuts of a job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..compression.errors import ConfigError
from .rules import at_least
from .schema import PlanConfig


@dataclass
class BenchCodecsConfig(PlanConfig):
    """The options of ``penstock bench codecs``; those of a plan, for classes=[job], and these.

    Attributes:
        optimizer: what updates the weights before real tensors are taken
        classes: tensors measured: synthetic, images, text, integers, masks; job: what crosses this job's cuts
        codecs: only these, of Penstock's and the others'; null: all that apply
        sizes: bytes of the synthetic tensors
        densities: shares of their elements that are not zero
        dtypes: floats that synthetic tensors are made in, and real ones cast to
        isa: kernels: avx512, avx2 or portable; null: the machine's best, and encode and decode beside them
        capture_steps: steps a network trains before its tensors are taken
        repeats: most alternating runs of all routes; medians count
    """

    optimizer: dict[str, Any] = field(default_factory=dict)
    classes: list[str] = field(default_factory=lambda: ["synthetic", "images", "text", "integers", "masks"])
    codecs: list[str] | None = None
    sizes: list[Any] = field(default_factory=lambda: ["32MiB"])
    densities: list[float] = field(default_factory=lambda: [0.1, 0.5, 0.9, 1.0])
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    isa: str | None = None
    capture_steps: int = 10
    repeats: int = 9

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("capture_steps", "repeats"):
            at_least(1, name, getattr(self, name))
        for density in self.densities:
            if not 0 <= density <= 1:
                raise ConfigError(f"densities={self.densities} must lie between 0 and 1, found {density}")
