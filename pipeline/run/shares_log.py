"""shares.jsonl: the weights by which the replicas of a run take micro-batches, and from which step on.

It has a line for the step that a run begins with, and one whenever shares change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...stages.files import reason, refusing

if TYPE_CHECKING:
    from ..pipeline import Pipeline
    from ..runtime.report import Report


class SharesLog:
    """Writes the lines of a run, ``after`` every step; without a path or replicas, nothing.

    A full disk does not end the training: a message says so, and the log ends there."""

    def __init__(self, pipe: Pipeline, path: Path | None, *, tell: Callable[[str], None]) -> None:
        """Begin with the step that is next: lines of earlier ones stay, later ones are cut off."""
        self._pipe, self._tell = pipe, tell
        self._path = path if max(pipe.plan.replicas) > 1 and not pipe.world.is_alone else None
        if self._path is None:
            return
        kept = _lines_before(pipe.num_steps, self._path) if pipe.num_steps and self._path.exists() else []
        with refusing(self._path):
            self._path.write_text("".join(f"{json.dumps(line)}\n" for line in kept), encoding="utf-8")
        self._shares = kept[-1]["shares"] if kept else None
        self._append()

    def after(self, report: Report) -> None:
        """Write the shares of the next step, if they are others, and say so."""
        if self._path is not None and self._append():
            shares = enumerate(self._pipe.plan.shares)
            stages = ", ".join(f"stage {stage} {list(own)}" for stage, own in shares if len(own) > 1)
            self._tell(f"shares of replicas behind step {report.step + 1}: {stages}")

    def _append(self) -> bool:
        plan = self._pipe.plan
        shares = [list(own) for own in plan.shares]
        if self._path is None or shares == self._shares:
            return False
        self._shares = shares
        line = {"step": self._pipe.num_steps, "shares": shares, "cuts": list(plan.cuts)}
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(line)}\n")
        except OSError as error:
            self._tell(f"{self._path} ends before step {self._pipe.num_steps}: {reason(error)}")
            self._path = None
        return True


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
