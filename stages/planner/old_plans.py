"""What older versions of ``plan.json`` said otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def from_version_1(data: Mapping[str, Any]) -> dict[str, Any]:
    """The same plan as version 2 has it; what is damaged stays so."""
    rest = {name: item for name, item in data.items() if name not in ("ranks", "tier", "weights_tier")}
    alike = {name: data[name] for name in ("tier", "weights_tier") if name in data}
    stages, ranks = data.get("stages"), data.get("ranks")
    if isinstance(stages, list) and isinstance(ranks, list) and len(stages) == len(ranks):
        rest["stages"] = [
            stage | alike | {"ranks": [rank]} if isinstance(stage, dict) else stage
            for stage, rank in zip(stages, ranks, strict=True)
        ]
    return rest
