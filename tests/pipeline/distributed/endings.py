"""Program of each of two started ranks: one ends as asked, a moment after the other has lost it.

It imports no torch, which takes seconds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from penstock.compression.errors import StageError, TransportError
from penstock.pipeline.distributed.launcher import run_rank


def act(what, errors, which):
    if what == "end well":
        return
    if os.environ["RANK"] != which:
        raise TransportError("a neighbour waited for the gradient of micro-batch 3")
    while not list(errors.glob("*.json")):
        time.sleep(0.01)
    if what == "stop":  # at once: it is seen when all are told to end, which it must not hear before
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2)  # the launcher has seen the other one's end, and gives the others two seconds
    if what == "be killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "leave a child":
        (errors.parent / "child").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        os._exit(7)
    if what == "exit":
        raise SystemExit(3)
    raise StageError("rank 1, stage 1, forward of micro-batch 2: the sky fell")


if __name__ == "__main__":
    ending, folder, rank = sys.argv[1:]
    run_rank(lambda: act(ending, Path(folder), rank), Path(folder))
