"""shares.jsonl: by what weight the replicas of a run took micro-batches, from which step on; and that again.

A line for the step that a run begins with, and one whenever shares change: so a run by measured speed, whose
sums hang on the clock, can be had again bit for bit."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...compression.errors import ConfigError
from ...conf.parts import MEASURED, REPLAY, ReplicasConfig
from ...conf.rules import shown
from ...stages.files import reason, refusing
from ..schedules.shares import Course

if TYPE_CHECKING:
    from ...stages.planner.plan import Plan
    from ..pipeline import Pipeline
    from ..runtime.report import Report

NAME = "shares.jsonl"


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
            self._tell(f"{self._path} lacks shares, and cannot be replayed: {self._failed}")

    def after(self, report: Report) -> None:
        """Write and tell the shares of the next step, if they are others."""
        if self._path is not None and self._pipe.plan.shares != self._shares:
            self._tell(f"shares of replicas behind step {report.step + 1}: {_told(self._pipe.plan)}")
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


def read_course(log: str) -> list[dict[str, Any]]:
    """The lines of a log: a run, or its file.

    Raises: ConfigError: there is none, or it is damaged."""
    path = Path(log)
    path = path / NAME if path.is_dir() else path
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        raise ConfigError(
            f"replicas.log={log}: {path} cannot be read ({reason(error)}); give a run with replicas"
        ) from error
    except ValueError as error:
        raise ConfigError(f"replicas.log={log}: {path} is damaged ({error}); take it from the run") from error
    if not lines or not all(map(_is_line, lines)):
        raise ConfigError(f"replicas.log={log}: {path} is no log of shares; take that of a run with replicas")
    return lines


def asked_shares(replicas: ReplicasConfig, plan: Plan) -> str | Course | None:
    """What ``Pipeline`` is told as ``shares=``; nothing where the plan has them.

    Raises: ConfigError: the log is of other cuts."""
    if replicas.shares == MEASURED:
        return MEASURED
    if replicas.shares != REPLAY or replicas.log is None:
        return None
    if not Path(replicas.log).exists():
        return REPLAY  # which rank 0 refuses, and decides for the others
    lines = read_course(replicas.log)
    theirs = next((line["cuts"] for line in lines if line["cuts"] != list(plan.cuts)), None)
    if theirs is not None:
        raise ConfigError(
            f"replicas.log={replicas.log} has the shares of cuts={shown(theirs)}, found cuts="
            f"{shown(list(plan.cuts))}; add plan=PATH of the plan.json of that run"
        )
    return [(line["step"], line["shares"]) for line in lines]


def _is_line(line: Any) -> bool:
    if not isinstance(line, dict) or set(line) != {"step", "shares", "cuts"} or type(line["step"]) is not int:
        return False
    rows = line["shares"]
    listed = isinstance(line["cuts"], list) and isinstance(rows, list)
    return listed and all(isinstance(row, list) for row in rows)


def _lines_before(first: int, path: Path) -> list[dict[str, Any]]:
    kept = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # the run was killed while it wrote
            break
        if not _is_line(line) or line["step"] >= first:
            break
        kept.append(line)
    return kept


def _listed(plan: Plan) -> list[list[int]]:
    return [list(own) for own in plan.shares]


def _told(plan: Plan) -> str:
    stages = [f"stage {s} {list(own)}" for s, own in enumerate(plan.shares) if len(own) > 1]
    return ", ".join(stages)
