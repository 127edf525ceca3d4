"""Asked: the cuts that ``partition`` was asked for, so that ranks that ask alike are known to mean one plan.

Every rank measures other seconds, so the same question may find another cut on every rank. The rest of what
was asked for (schedule, micro-batches, limits and so on) stands in the plan itself."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """``stages``, ``ranks`` and ``cuts`` as a person gave them, None: left to the planner; ``replicas``
    where there are some, ``divided``: how it was asked for where the planner chose them."""

    stages: int | None
    ranks: int | None
    cuts: tuple[str, ...] | None
    replicas: tuple[int, ...] | None = None
    divided: str | None = None

    def __str__(self) -> str:
        said = {"stages": self.stages, "ranks": self.ranks, "cuts": self.cuts and f"[{','.join(self.cuts)}]"}
        said |= {"replicas": self.divided or (self.replicas and list(self.replicas))}
        return " ".join(f"{name}={value}" for name, value in said.items() if value is not None)
