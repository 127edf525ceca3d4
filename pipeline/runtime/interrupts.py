"""Ctrl-C while a pipeline works: it takes effect between two instructions, where no lock or thread is half
done, and never inside an update, but behind it. A second one takes effect at once; nothing goes on then."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

from ...compression.errors import StageError
from .failures import Failures

Method = TypeVar("Method", bound=Callable[..., Any])


class Interrupts:
    """Holds back the Ctrl-C of a main thread in which nobody else handles it."""

    def __init__(self, failures: Failures) -> None:
        self.failures, self.asked, self._inside = failures, False, threading.RLock()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """The block in which one thread uses the pipeline, and its Ctrl-C waits.

        Raises: StageError: another thread is inside."""
        if not self._inside.acquire(blocking=False):
            raise StageError(
                "a pipeline does one thing at a time, and another thread uses it now; wait for that"
            )
        try:
            with self._held():
                yield
        finally:
            self._inside.release()

    @contextlib.contextmanager
    def _held(self) -> Iterator[None]:
        """Delay Ctrl-C until ``check``, or the end of the block."""
        mine = threading.current_thread() is threading.main_thread()
        if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        self.asked = False
        signal.signal(signal.SIGINT, self._hear)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self.check()

    def check(self) -> None:
        """Let a Ctrl-C that was held back take effect."""
        if self.asked:
            self.asked = False
            raise KeyboardInterrupt

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            self.asked = False
            self.failures.closed = "was interrupted in the middle of an instruction"
            raise KeyboardInterrupt
        self.asked = True


def held(method: Method) -> Method:
    """A method of a pipeline that one thread runs at a time, and during which Ctrl-C waits."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.engine.interrupts.alone():
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]
