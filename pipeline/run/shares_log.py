"""shares.jsonl: by what weight the replicas of a run took micro-batches, from which step on.

It has a line for the step that a run begins with, and one whenever shares change."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...stages.files import reason, refusing

if TYPE_CHECKING:
    from ...stages.plan.plan import Plan
    from ..pipeline import Pipeline
    from ..runtime.report import Report


class SharesLog:
    """Writes the lines of a run, ``after`` every step, and tells of changes; without a path, nothing.

    A disk that fills up ends no training: what could not be written is told."""

    def __init__(self, pipe: Pipeline, path: Path | None, *, tell: Callable[[str], None]) -> None:
        """Begin with the step that is next: lines of earlier ones stay, later ones are cut off."""
        self._pipe, self._tell, self._failed = pipe, tell, ""
        self._path = path if max(pipe.plan.replicas) > 1 and not pipe.world.is_alone else None
        self._shares: Any = None
        if self._path is None:
            return
        kept = _lines_before(pipe.num_steps, self._path) if pipe.num_steps and self._path.exists() else []
        with refusing(self._path):
            self._path.write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
        if kept and kept[-1]["shares"] == _listed(pipe.plan):
            self._shares = pipe.plan.shares
        self._note()

    def __enter__(self) -> SharesLog:
        return self

    def __exit__(self, *_: object) -> None:
        if self._failed:
            self._tell(f"{self._path} lacks shares: {self._failed}")

    def after(self, report: Report) -> None:
        """Write and tell the shares of the next step, if they are others."""
        if self._path is not None and self._pipe.plan.shares != self._shares:
            shares = enumerate(self._pipe.plan.shares)
            stages = ", ".join(f"stage {stage} {list(own)}" for stage, own in shares if len(own) > 1)
            self._tell(f"shares of replicas behind step {report.step + 1}: {stages}")
            self._note()

    def _note(self) -> None:
        plan = self._pipe.plan
        assert self._path is not None
        if plan.shares == self._shares:
            return
        self._shares = plan.shares
        line = {"step": self._pipe.num_steps, "shares": _listed(plan), "cuts": list(plan.cuts)}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(line)}\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._failed = self._failed or reason(error)


def _lines_before(first: int, path: Path) -> list[dict[str, Any]]:
    kept = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
            is_earlier = line["step"] < first and "shares" in line
        except (ValueError, TypeError, KeyError):  # the run was killed while it wrote
            break
        if not is_earlier:
            break
        kept.append(line)
    return kept


def _listed(plan: Plan) -> list[list[int]]:
    return [list(own) for own in plan.shares]
