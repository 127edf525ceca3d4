"""Instructions: what a rank does next, printed and parsed as ``1F3`` (stage 1, forward, micro-batch 3)."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...compression.errors import ScheduleError


class Op(enum.Enum):
    """Kind of an instruction: forward, backward, its two halves (for the inputs, for the weights), update.

    B = I, then W, with the same bits. Source: Qi et al., Zero Bubble, ICLR 2024, section 2."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 (the field's name for it)
    W = "W"
    U = "U"

    __hash__ = object.__hash__  # that of Enum is written in Python, and messages are looked up often


class Instruction(NamedTuple):
    """One piece of work of one stage; ``micro_batch`` is None for U, which takes what gradients are due."""

    stage: int
    op: Op
    micro_batch: int | None = None

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{'' if self.micro_batch is None else self.micro_batch}"


Programs = Sequence[Sequence[Instruction]]
"""One program, in order, for each rank."""

_WRITTEN = re.compile(r"([0-9]{1,9})(?:([FBIW])([0-9]{1,9})|(U))")


def parse(text: str) -> Instruction:
    """Read ``"1F3"`` or ``"1U"``; raises ScheduleError for anything else."""
    if (found := _WRITTEN.fullmatch(text)) is None:
        raise ScheduleError(
            f"an instruction is a stage, F, B, I or W and a micro-batch, or a stage and U, found {text!r}; "
            "write it like 1F3 or 1U"
        )
    stage, op, micro_batch, update = found.groups()
    return Instruction(int(stage), Op(op or update), None if update else int(micro_batch))


def show(program: Iterable[Instruction]) -> str:
    """Write a program in one line: ``"0F0 0F1 0B0 0B1"``."""
    return " ".join(map(str, program))


def parse_program(text: str) -> list[Instruction]:
    """Read a program written by ``show``; raises ScheduleError."""
    return [parse(word) for word in text.split()]


class Span(NamedTuple):
    """One instruction as it ran, in seconds since the step began; first it waited for ``waiting`` seconds.

    ``packing``: seconds of it in which frames were packed and unpacked. ``bytes_raw`` and ``bytes_sent``: the
    tensors that it sent to other stages, before and after packing, with ``codec``.
    """

    rank: int
    stage: int
    op: str
    micro_batch: int | None
    start: float
    waiting: float
    end: float
    packing: float = 0.0
    bytes_raw: int = 0
    bytes_sent: int = 0
    codec: str = ""

    @property
    def name(self) -> str:
        """The instruction as text: ``1F3``."""
        return f"{self.stage}{self.op}{'' if self.micro_batch is None else self.micro_batch}"

    @property
    def computing(self) -> float:
        """Seconds of computing and packing."""
        return self.end - self.start - self.waiting


class Flow(NamedTuple):
    """All frames of one value from stage to stage ("F"), or of its gradient ("B")."""

    value: str
    way: str
    source: int
    target: int

    @property
    def downstream(self) -> Flow:
        """The flow of the value whose gradient this is."""
        return Flow(self.value, "F", self.target, self.source)
