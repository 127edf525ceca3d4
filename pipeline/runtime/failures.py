"""Errors and Ctrl-C in a step.

Ctrl-C takes effect between two instructions, where no lock or thread is half done, and never inside an
update, but after it. A second one takes effect at once, and nothing goes on then."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ...compression.errors import PenstockError, StageError, TransportError
from ..schedules.instruction import Instruction, Op

if TYPE_CHECKING:
    from ...stages.stage.stage import Stage
    from ..distributed.gpu_transport import Transport
    from .step_planner import Step

WORDS = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward for the inputs",
    Op.W: "backward for the weights",
    Op.U: "update",
}


class Failures:
    """Words the errors of a rank; ``first`` is the sentence of the first one since a step began, ``over`` why
    only a state that is loaded goes on, ``closed`` what happened to a pipeline that does nothing more; else
    ""."""

    def __init__(self, rank: int, stages: Mapping[int, Stage], transport: Transport) -> None:
        self.rank, self.stages, self.transport = rank, stages, transport
        self.first = self.over = self.closed = ""

    def check_open(self) -> None:
        """Refuse a pipeline that does nothing more."""
        if self.closed:
            raise StageError(f"a pipeline that {self.closed} does nothing more; make another one")

    def check(self) -> None:
        """Refuse to go on once it is closed, its weights are of two steps, or ranks stopped in the middle of
        a step."""
        self.check_open()
        if self.over:
            raise StageError(self.over)
        if self.first and not self.transport.survives_failure:
            raise TransportError(
                f"these ranks stopped in the middle of a step ({self.first}); start them anew"
            )

    def of_step(self, step: Step, instruction: Instruction | None, error: BaseException) -> PenstockError:
        """Describe an error in a step; ``instruction`` is None before its first one, and after its last."""
        if instruction is None:
            where = f"step {step.number}" if step.training else "evaluation"
        else:
            stage, op, index = instruction
            of = "" if index is None else f" of micro-batch {index}"
            where = f"stage {stage}, {WORDS[op]}" + f"{of}, step {step.number}" * step.training
        return self.describe(where, error)

    def describe(self, where: str, error: BaseException) -> PenstockError:
        """Say of an error where it was, leave word for the other ranks, and let go of what was running."""
        kind = type(error) if isinstance(error, PenstockError) else StageError
        what = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
        what = (_of_memory(what, error) or what).removesuffix(": ")
        what = what.removeprefix(f"rank {self.rank} ")  # lost the group: it is said where
        sentence = what if what.startswith("rank ") else f"rank {self.rank}, {where}: {what}"
        if not self.first:
            self.first = sentence
            self.transport.fail(sentence)
        for stage in self.stages.values():
            stage.stop()
        return kind(sentence)


def _of_memory(what: str, error: BaseException | None) -> str:
    """Text where a device had no memory left, whatever its wording; "" for other errors."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    if error is None:
        return ""
    said = ". ".join(str(error).split(". ")[:2]).replace(". T", ", t")  # torch's own remedies follow
    found = what.partition(str(error))[0] + said
    return (
        f"a stage computes in the memory of its device, which was not enough, found {found}; raise "
        "micro_batches=, take memory.tier=host, or more ranks"
    )


Method = TypeVar("Method", bound=Callable[..., Any])


class Interrupts:
    """Holds back the Ctrl-C of a main thread in which nobody else handles it."""

    def __init__(self, failures: Failures) -> None:
        self.failures, self.asked, self._inside = failures, False, threading.RLock()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """The block in which one thread uses the pipeline, and its Ctrl-C waits for ``check``, or the end."""
        if not self._inside.acquire(blocking=False):
            raise StageError(
                "a pipeline does one thing at a time, and another thread uses it now; wait for that"
            )
        try:
            mine = threading.current_thread() is threading.main_thread()
            holds = mine and signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if holds:
                self.asked = False
                signal.signal(signal.SIGINT, self._hear)
            try:
                yield
            finally:
                if holds:
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    self.check()
        finally:
            self._inside.release()

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
        with self.interrupts.alone():
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]
