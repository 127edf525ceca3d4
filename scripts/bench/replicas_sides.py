"""Who takes part in ``penstock bench replicas``, by name; known without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ALONE, EVEN, EXACT, WEIGHTED = "one rank", "[2]", "[2] exact", "[2] by speed"
BESIDE, BESIDE_EXACT = "[1, 2]", "[1, 2] exact"
TWO, THREE, SAME = "two stages", "three stages", "two stages, cut as [1, 2]"

SIDES: dict[str, dict[str, Any]] = {
    ALONE: {"stages": 1, "ranks": 1},
    EVEN: {"replicas": [2]},
    EXACT: {"replicas": [2], "exact": True},
    BESIDE: {"replicas": [1, 2]},
    BESIDE_EXACT: {"replicas": [1, 2], "exact": True},
    TWO: {"stages": 2},
    THREE: {"stages": 3},
    SAME: {"stages": 2},
}
"""What ``partition`` is asked for. Those cut as another one get its cuts beside."""

CUT_AS = {SAME: BESIDE, BESIDE_EXACT: BESIDE}

PARTS: dict[str, tuple[str, ...]] = {
    "speeds": (ALONE, EVEN),
    "stages": (TWO, THREE, BESIDE, SAME),
    "exact": (ALONE, EVEN, EXACT),
    "bytes": (EVEN, EXACT, BESIDE, BESIDE_EXACT, THREE),
}
"""Who takes turns in each part; the first of ``stages`` is what the others are compared with."""


def weighted(factor: int) -> str:
    """What the side is called whose second rank takes ``factor`` times as long, and less."""
    return f"{WEIGHTED} 1:{factor}"


def sides_of(parts: Sequence[str]) -> list[str]:
    """Everybody who takes part, each once."""
    return list(dict.fromkeys(name for part in parts for name in PARTS[part]))


def even_share(factor: float) -> float:
    """How much of two ranks' summed speed even shares can have, where one takes ``factor`` times as long, and
    both wait for it."""
    return 2 / (1 + factor)


def dealt(factor: float, micro_batches: int) -> list[int]:
    """How many micro-batches each of two ranks gets by speed, the slow one at least one."""
    slow = max(1, round(micro_batches / (1 + factor)))
    return [micro_batches - slow, slow]


def wire_bytes(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """The bytes that a process wrote between two readings of ``/proc/self/io``."""
    return after["wchar"] - before["wchar"]
