"""Signals that ask a run to stop: it finishes its step, writes a checkpoint, ends with 128 + their number.

SIGTERM is what a batch system or a launcher sends before it kills, SIGUSR1 Slurm's warning ahead of a time
limit. Whoever is asked tells the other ranks with the report of the step, so that all stop behind the same
one and no step has an exchange more."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

ASKING = (signal.SIGTERM, signal.SIGUSR1)

SAME_SECONDS = 1.0
"""What comes so soon behind the first is the same request: a batch system and a launcher both send it."""


class Stopped(KeyboardInterrupt):
    """A signal told this process to end; ``number`` is the signal's."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def code(self) -> int:
        """Exit code of a shell for that signal: 130 for Ctrl-C, 143 for SIGTERM, 138 for SIGUSR1."""
        return 128 + self.number


@contextlib.contextmanager
def heard(tell: Callable[[int], None]) -> Iterator[None]:
    """Inside, a signal of ``ASKING`` calls ``tell`` with its number; the same one again means what it did
    before. Only the main thread hears; signals that this process ignores it goes on ignoring."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in ASKING}
    first: dict[int, float] = {}

    def hear(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - first.setdefault(number, now) > SAME_SECONDS:
            _restore(before)
            then = before[signal.Signals(number)]
            then(number, frame) if callable(then) else os.kill(os.getpid(), number)
        elif now == first[number]:
            tell(number)

    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, hear)
    try:
        yield
    finally:
        _restore(before)


def _restore(handlers: dict[signal.Signals, Callable[[int, FrameType | None], object] | int]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
