"""An audit of a run while it trains: ``penstock audit`` of a step, from time to time, in its own process.

It has the lowest priority, so it takes what the ranks leave of the cores of rank 0's machine."""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from ...conf.schema import TrainConfig
from ...stages.files import reason
from ...stages.units import parse_duration
from ..runtime.report import Report
from .run_folder import RunFolder, step_of

_NICEST = 19
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class LiveAudit:
    """Audits of a run in ``folder``, one at a time, each of a step on record after the newest checkpoint.

    Attributes:
        result: Steps that were repeated, and those of them that differed."""

    def __init__(
        self, folder: RunFolder, config: TrainConfig, *, runs: bool, tell: Callable[[str], None]
    ) -> None:
        """``runs``: on this rank, if ``config`` asks for it."""
        self._folder, self._digest_every, self._tell = folder, config.digest.every or 1, tell
        every = config.audit.every if runs else None
        self._seconds = math.inf if every is None else parse_duration(every, name="audit.every")
        self.result: dict[str, list[int]] = {"steps": [], "differ": []}
        self._process: subprocess.Popen[str] | None = None
        self._step, self._last = 0, time.monotonic()

    def after(self, report: Report) -> None:
        """See whether an audit has ended, and whether it is time for the next."""
        if self._process is not None:
            if self._process.poll() is not None:
                self._read(self._process)
                self._process, self._last = None, time.monotonic()
        elif time.monotonic() - self._last >= self._seconds:
            checkpoints = self._folder.whole_checkpoints()
            begin = step_of(checkpoints[0]) if checkpoints else report.step + 1
            steps = [n for n in range(begin, report.step + 1) if (n + 1) % self._digest_every == 0]
            if steps:
                self._begin(random.SystemRandom().choice(steps))

    def close(self) -> None:
        """End an audit that is on its way."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _begin(self, step: int) -> None:
        self._step = step
        command = [sys.executable, "-m", "penstock", "audit", str(self._folder.path)]
        command += [f"step={step}", f"seed={step}"]
        how: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        environment = {key: value for key, value in os.environ.items() if key not in _OF_A_RANK}
        try:
            self._process = subprocess.Popen(
                command, env=environment, start_new_session=True, text=True, **how
            )
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICEST)
        except OSError as error:
            self._tell(f"audit.every=: no process could be started ({reason(error)})")
            self._seconds = math.inf

    def _read(self, process: subprocess.Popen[str]) -> None:
        said = process.communicate()[0].strip()
        if process.returncode not in (0, 1):
            self._tell(f"audit.every=: step {self._step} could not be repeated: {said}")
            return
        self.result["steps"].append(self._step)
        if process.returncode:
            self.result["differ"].append(self._step)
            self._tell(f"audit.every=: {said}")
