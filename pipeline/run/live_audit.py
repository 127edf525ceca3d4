"""An audit of a run while it trains: ``penstock audit`` of a step, from time to time, in its own process.

It has the lowest priority, so it takes what the ranks leave of the cores of rank 0's machine."""

import contextlib
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import IO

from ...stages.files import reason
from ..distributed import rank as started
from ..runtime.report import Report
from .run_folder import RunFolder, step_of

_NICEST = 19
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_MOST_BYTES = 1 << 16  # of what an audit said that is read


class LiveAudit:
    """Audits of a run in ``folder``, one at a time, each of a step on record after the newest checkpoint.

    Attributes:
        result: Steps that were repeated, and those of them that differed."""

    def __init__(
        self, folder: RunFolder, *, seconds: float, digest_every: int, tell: Callable[[str], None]
    ) -> None:
        self._folder, self._seconds, self._digest_every, self._tell = folder, seconds, digest_every, tell
        self.result: dict[str, list[int]] = {"steps": [], "differ": []}
        self._process: subprocess.Popen[bytes] | None = None
        self._step, self._last = 0, time.monotonic()
        self._files: list[IO[bytes]] = []  # standard output and errors of the process

    def after(self, report: Report) -> None:
        """See whether an audit has ended, and whether it is time for the next."""
        if self._process is not None:
            self._see(self._process)
        elif time.monotonic() - self._last >= self._seconds:
            checkpoints = self._folder.whole_checkpoints()
            begin = step_of(checkpoints[0]) if checkpoints else report.step + 1
            steps = [n for n in range(begin, report.step + 1) if (n + 1) % self._digest_every == 0]
            if steps:
                self._begin(random.SystemRandom().choice(steps), begin)

    def close(self) -> None:
        """Take the result of an audit that has ended, and end one that is on its way."""
        if self._process is not None:
            self._see(self._process)
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for file in self._files:
            file.close()

    def _begin(self, step: int, checkpoint: int) -> None:
        self._step, self._last = step, time.monotonic()
        package = __name__.partition(".")[0]
        command = [sys.executable, "-P", "-m", started.__name__, package, "audit", str(self._folder.path)]
        command += [f"step={step}", f"seed={step}", f"oldest={checkpoint}"]
        environment = {key: value for key, value in os.environ.items() if key not in _OF_A_RANK}
        environment |= {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            started.LAUNCHER: str(os.getpid()),
        }
        try:
            self._files = [tempfile.TemporaryFile() for _ in range(2)]
            out, errors = self._files
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=errors
            )
        except OSError as error:
            self._tell(f"audit.every=: no audit could be started ({reason(error)})")
            return
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICEST)

    def _see(self, process: subprocess.Popen[bytes]) -> None:
        """Take the result of ``process`` if it has ended."""
        if process.poll() is None:
            return
        self._process, self._last = None, time.monotonic()
        said, errors = map(_text_of, self._files)
        found = re.search(rf"^step {self._step} \(.*", said, re.MULTILINE | re.DOTALL)
        differs = process.returncode == 1 and found is not None  # else it is an error of Python's
        if process.returncode and not differs:
            why = errors.splitlines()[-1] if errors else f"it ended with {process.returncode}"
            self._tell(f"audit.every=: step {self._step} could not be repeated: {why}")
            return
        self.result["steps"].append(self._step)
        if found is not None and differs:
            self.result["differ"].append(self._step)
            self._tell(f"audit.every=: {found[0]}")


def _text_of(file: IO[bytes]) -> str:
    """Return the end of what was written to a file, and close it."""
    with file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_BYTES))
        return file.read().decode(errors="replace").strip()
