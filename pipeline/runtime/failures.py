"""Text of an error in a step: the rank, the stage, the instruction, and what happened there."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...compression.errors import PenstockError, StageError, TransportError
from ...stages.stage.stage import Stage
from ..distributed.transport import Transport
from ..schedules.instruction import Instruction, Op
from .step_planner import Step

WORDS = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward for the inputs",
    Op.W: "backward for the weights",
    Op.U: "update",
}


class Failures:
    """Words the errors of a rank; ``first`` is the sentence of the first one since a step began.

    Attributes: over: why only a state that is loaded goes on, "" while all goes on; closed: what happened to
                the pipeline that it does nothing more, "" while it does."""

    def __init__(self, rank: int, stages: Mapping[int, Stage], transport: Transport) -> None:
        self.rank, self.stages, self.transport = rank, stages, transport
        self.first = self.over = self.closed = ""

    def check_open(self) -> None:
        """Refuse a pipeline that does nothing more."""
        if self.closed:
            raise StageError(f"a pipeline that {self.closed} does nothing more; make another one")

    def check(self) -> None:
        """Refuse to go on where it was closed, where weights are of two steps, and after a failure that may
        have left other ranks elsewhere in the program."""
        self.check_open()
        if self.over:
            raise StageError(self.over)
        if self.first and not self.transport.survives_failure:
            raise TransportError(
                f"these ranks stopped in the middle of a step ({self.first}); start them anew"
            )

    def worded(self, where: str, error: BaseException) -> PenstockError:
        """Say of an error where it was, leave word for the other ranks, and let go of what was running."""
        kind = type(error) if isinstance(error, PenstockError) else StageError
        what = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
        what = _of_memory(what, error) or what
        what = what.removesuffix(": ")
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


def place(step: Step, instruction: Instruction | None) -> str:
    """Describe the place in a step; None: before its first instruction, or after its last."""
    if instruction is None:
        return f"step {step.number}" if step.training else "evaluation"
    what = f"stage {instruction.stage}, {WORDS[instruction.op]}"
    if not step.training:
        return what
    of = "" if instruction.micro_batch is None else f" of micro-batch {instruction.micro_batch}"
    return f"{what}{of}, step {step.number}"
