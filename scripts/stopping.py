"""End of the command when a person or the system stops it: one sentence, and the code a shell expects.

The first signal unwinds the run, so that its ranks end with it; a second one ends everything at once. Python
hears a signal only between two of its own steps, and a layer or a wait may take long, so a thread hears them
as well and ends what does not unwind. While a run trains, SIGTERM and SIGUSR1 ask it to finish its step
(``pipeline/distributed/processes.py``)."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from ..pipeline.distributed.processes import SAME_SECONDS, Stopped

if TYPE_CHECKING:
    from ..pipeline.run.run_folder import RunFolder

SIGNALS = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGUSR1: "SIGUSR1",
    signal.SIGHUP: "the end of its terminal",
}

UNWINDING_SECONDS = 1.5  # that a run may take to end by itself after a signal


def listen() -> None:
    """Let the signals that end a process raise ``Stopped``, but those that this process was to ignore."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read,), name="penstock-signals", daemon=True).start()


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    for one in SIGNALS:
        if signal.getsignal(one) == _stop:
            signal.signal(one, signal.SIG_DFL)
    raise Stopped(number)


def _watch(arrived: int) -> None:
    """End this process where a signal that ends it finds nobody who listens."""
    asked: dict[int, float] = {}
    ends = False
    while True:
        number, now = os.read(arrived, 1)[0], time.monotonic()
        if number not in SIGNALS:
            continue
        if signal.getsignal(number) not in (_stop, signal.SIG_DFL):  # a run that trains was asked to stop
            if now - asked.setdefault(number, now) <= SAME_SECONDS:
                continue
        if ends:
            os._exit(128 + number)
        ends = True
        cut = threading.Timer(UNWINDING_SECONDS, _cut_off, [number])
        cut.daemon = True
        cut.start()


def _cut_off(number: int) -> None:
    end = f"stopped by {SIGNALS[signal.Signals(number)]}, and cut off, as a layer or a file took longer"
    print(f"penstock: {end}; resume=auto goes on from the last checkpoint of its folder", file=sys.stderr)
    os._exit(128 + number)


def sentence(stop: KeyboardInterrupt) -> str:
    """Return the last sentence: what stopped the command, and what is left of its runs."""
    kept = " ".join(getattr(stop, "__notes__", ())) or "nothing was begun"
    return f"stopped by {SIGNALS[signal.Signals(number(stop))]}; {kept}"


def kept(folder: RunFolder, *, command: str) -> str:
    """Say what an interrupted run left in its folder, and how to begin again by ``command``, as typed."""
    kept = (path for path in folder.path.glob("*") if path.name[0] != "." and path.suffix != ".part")
    files = ", ".join(sorted(path.name for path in kept))
    again = f"start it again from the beginning by {command}"
    if whole := folder.whole_checkpoints():
        resume = "" if "resume=auto" in command else " resume=auto"
        place = "" if "hydra.run.dir=" in command else f" hydra.run.dir={folder.path}"
        return f"{folder.path} keeps a checkpoint, {whole[0].name}; go on from it by {command}{place}{resume}"
    if not files:
        return f"nothing was kept; {again}"
    with contextlib.suppress(OSError):
        steps = folder.metrics.read_bytes().count(b"\n")
        files += f" ({steps} step{'s' * (steps != 1)})"
    return f"{folder.path} keeps {files}, and no checkpoint of the weights; {again}"


def number(stop: KeyboardInterrupt) -> int:
    """Return the number of the signal that stopped the command."""
    return stop.number if isinstance(stop, Stopped) else signal.SIGINT
