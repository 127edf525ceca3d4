"""A run that a signal asks to stop: behind the same step on all ranks it writes a checkpoint, and ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ..pipeline import Pipeline
from ..ranks.groups import hearing
from ..ranks.signals import Stopped
from ..runtime.report import Report


class Asked:
    """Listens while a run trains; ``after`` every step, and ``between`` batches of a test, it may end here.

    Args: keep: writes a checkpoint and waits for it; collective."""

    def __init__(self, pipe: Pipeline, keep: Callable[[], None]) -> None:
        self.pipe, self.keep = pipe, keep
        self._listening = contextlib.ExitStack()

    def __enter__(self) -> Asked:
        self._listening.enter_context(hearing(self.pipe.world.group, self._note))
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()

    def after(self, report: Report) -> None:
        """Stop behind a step whose report says that a rank was asked to.

        Raises: Stopped: one was, on every rank."""
        if report.asked:
            self._stop(report.asked)

    def between(self) -> None:
        """The same in the middle of a test, which is done again by the run that goes on; collective.

        Raises: Stopped: a rank was asked to stop."""
        rows = self.pipe.world.all_gather([self.pipe.asked], at="the middle of a test")
        if asked := int(max(row[0] for row in rows)):
            self._stop(asked)

    def _note(self, number: int) -> None:
        self.pipe.asked = number

    def _stop(self, number: int) -> None:
        self.keep()
        self.pipe.close()
        raise Stopped(number)
