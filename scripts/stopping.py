"""How the command ends when a person or the system stops it: one sentence, and the code a shell expects.

The first signal unwinds the run, so that its ranks end with it; a second one ends everything at once."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import NoReturn

SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "the end of its terminal"}


class Stopped(KeyboardInterrupt):
    """A signal told this process to end."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def listen() -> None:
    """Let the signals that end a process raise ``Stopped``, but those that this process was to ignore."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _stop)


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    for one in SIGNALS:
        if signal.getsignal(one) == _stop:
            signal.signal(one, signal.SIG_DFL)
    raise Stopped(number)


def exit_code(stop: KeyboardInterrupt) -> int:
    """What a shell calls the end by that signal: 130 for Ctrl-C, 143 for SIGTERM."""
    return 128 + _number(stop)


def sentence(stop: KeyboardInterrupt) -> str:
    """What to tell: what stopped the command, and what is left of its runs."""
    kept = " ".join(getattr(stop, "__notes__", ())) or "nothing was begun"
    return f"stopped by {SIGNALS[signal.Signals(_number(stop))]}; {kept}"


def kept(folder: Path) -> str:
    """Say what an interrupted run left in its folder, and how to go on."""
    names = sorted(path.name for path in folder.glob("*") if path.name[0] != "." and path.suffix != ".part")
    left = f"{folder} keeps {', '.join(names)}" if names else "nothing was kept"
    return f"{left}; no checkpoint was made, so the same command starts anew"


def _number(stop: KeyboardInterrupt) -> int:
    return stop.number if isinstance(stop, Stopped) else signal.SIGINT
