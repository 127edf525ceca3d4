"""Early ends of a run: a loss that is no number, or tests that have not been better for long."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ...conf.schema import TrainConfig
from ...stages.plan.plan import Plan
from ..runtime.report import Report

NOT_FINITE = 3
"""Exit code of a run that ended because its loss was no number."""

_OVERFLOWS = 10  # steps in a row that a GradScaler may skip until it has found its scale
_STATE = ("metric", "best", "best_step", "since")


class Judge:
    """Sees every step and every test on each rank, and decides alike on all of them.

    Attributes:
        ended: Why the run ends now; empty while it goes on.
        metric: Result of a test that decides which is the best.
        best: That result of the best test; None before the first.
        best_step: Steps that were done before it.
        since: Tests after it.
    """

    def __init__(self, config: TrainConfig, plan: Plan, *, tell: Callable[[str], None]) -> None:
        self.ended, self.metric = "", config.checkpoint.best or "loss"
        self.best: float | None = None
        self.best_step = self.since = 0
        self._tell, self._patience, self._stops = tell, config.eval.patience, config.nan == "stop"
        # Where few micro-batches fill a stream, its first steps finish none, and have no loss.
        self._allowed = plan.num_stages if plan.streams else _OVERFLOWS * (config.loss_scale == "dynamic")
        self._in_a_row, self._told = 0, False

    def step(self, report: Report) -> None:
        """Warn of the first loss that is no number, and end the run unless ``nan=warn``."""
        self._in_a_row = 0 if math.isfinite(report.loss) else self._in_a_row + 1
        if self._told or self._in_a_row <= self._allowed:
            return
        self._told, sentence = True, f"step {report.step + 1}: the loss is {report.loss}"
        ends = "the run ends; begin anew" if self._stops else "the run goes on; better begin anew"
        remedy = "with a lower optimizer.lr or clip.norm=1, or have detect_anomaly=true name the layer"
        self._tell(f"{sentence}, and {ends} {remedy}")
        self.ended = sentence if self._stops else ""

    def test(self, results: Mapping[str, float], step: int) -> bool:
        """Return True if no test was as good before."""
        if self.metric not in results:
            self._tell(
                f"checkpoint.best={self.metric}: these tests have no {self.metric}, so the loss decides"
            )
            self.metric = "loss"
        result, sign = results[self.metric], 1 if self.metric == "accuracy" else -1
        again = step == self.best_step  # by a run that goes on
        is_best = again or self.best is None or sign * result > sign * self.best
        if is_best := is_best and math.isfinite(result):
            self.best, self.best_step, self.since = result, step, 0
        elif not again:
            self.since += 1
        if self._patience is not None and self.since >= self._patience:
            best = "no number" if self.best is None else f"{self.best:.4f} after step {self.best_step}"
            self.ended = f"no better test in the last {self.since}: {self.metric} {best}"
            self._tell(f"step {step}: {self.ended}; the run ends")
        return is_best

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {name: getattr(self, name) for name in _STATE}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what a checkpoint kept, if its tests were compared by the same result."""
        if state and state["metric"] == self.metric:
            vars(self).update({name: state[name] for name in _STATE})
