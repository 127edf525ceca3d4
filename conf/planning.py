"""The options of ``penstock plan``: those of a plan, and what it shows beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .parts import MemoryConfig
from .schema import PlanConfig


@dataclass
class PlanningMemoryConfig(MemoryConfig):
    """Limits of memory, the tiers of what waits, and whether to list what fills it.

    Attributes:
        table: print what every layer saves for its backward, and write all of it to memory.csv
    """

    table: bool = False


@dataclass
class PlanningConfig(PlanConfig):
    """The options of ``penstock plan``: those of a plan, and these.

    Attributes:
        graph: draw which layer depends on which data, to graph.png, and write it to graph.json
    """

    graph: bool = False
    memory: PlanningMemoryConfig = field(  # pyright: ignore[reportIncompatibleVariableOverride] more of it
        default_factory=PlanningMemoryConfig
    )
