"""Who says how a message is packed, and how many are in flight: one setting, or ``auto.Auto``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from ...compression.zero_value import has_bitmap
from ..schedules.messages import Flow, Message, StepMessages
from ..schedules.prices import MASKED
from ..schedules.span import Span

Named = Mapping[tuple[str, str, int], str]  # a plan's: by value, way and stage, as a flow begins


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A setting that ran for some steps: seconds of a step, predicted and measured, and whether it stayed.

    ``extra``: micro-batches in flight beyond the schedule's own."""

    name: str
    extra: int
    predicted: float
    measured: float
    stayed: bool


class Policy(Protocol):
    """Says with which codec a flow is packed; looks at what travels, and at the steps, to find out.

    ``turns``: the last choices that ran against each other; none where there was nothing to choose."""

    turns: tuple[Turn, ...]

    @property
    def extra(self) -> int:
        """How many micro-batches more than the schedule's own the next step has in flight."""
        ...

    @property
    def settled(self) -> bool:
        """Whether this is not one of the first steps, in which choices are still tried."""
        ...

    def codec(self, flow: Flow) -> str:
        """The codec for the frames of ``flow``, behind ``MASKED`` if they are to use a bitmap."""
        ...

    def observed(self, messages: StepMessages) -> int | None:
        """The micro-batch of a step whose tensors ``arriving`` and ``leaving`` are to see, or None."""
        ...

    def arriving(self, message: Message, item: torch.Tensor) -> None:
        """A value has arrived."""
        ...

    def leaving(self, message: Message, item: torch.Tensor) -> None:
        """A value or gradient is about to be packed."""
        ...

    def end(self, others: Callable[[int], StepMessages], spans: Sequence[Span], seconds: float) -> None:
        """A step has ended; every rank calls this after every step.

        ``others``: the messages of such a step with so many more in flight."""
        ...


class Fixed:
    """One codec for everything but what is ``named``."""

    def __init__(self, codec: str, named: Named | None = None, *, extra: int = 0) -> None:
        self.name, self.named, self.extra = codec, named or {}, extra
        self.turns: tuple[Turn, ...] = ()

    @property
    def settled(self) -> bool:
        """From the start."""
        return True

    def codec(self, flow: Flow) -> str:
        """Always the same; a gradient uses the bitmap where there is one."""
        return wherever_masked(self.named.get(flow[:3], self.name), flow)

    def observed(self, messages: StepMessages) -> int | None:
        """Nothing to find out."""
        return None

    def arriving(self, message: Message, item: torch.Tensor) -> None:
        """Nothing to find out."""

    def leaving(self, message: Message, item: torch.Tensor) -> None:
        """Nothing to find out."""

    def end(self, others: Callable[[int], StepMessages], spans: Sequence[Span], seconds: float) -> None:
        """Nothing to decide."""


def wherever_masked(codec: str, flow: Flow) -> str:
    """``codec``, behind ``MASKED`` for a gradient if it can use a bitmap."""
    return codec if flow.way == "F" or not has_bitmap(codec) else MASKED + codec
