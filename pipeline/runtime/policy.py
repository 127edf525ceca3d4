"""Who says with which codec a message is packed: one codec for everything, or ``auto.Auto``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ...compression.masked import has_bitmap
from ..schedules.messages import Flow, Message, StepMessages
from ..schedules.prices import MASKED
from ..schedules.span import Span

Named = Mapping[tuple[str, str, int], str]  # a plan's: by value, way and stage, as a flow begins


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A choice that ran for some steps: seconds of a step, predicted and measured, and whether it stayed."""

    name: str
    predicted: float
    measured: float
    stayed: bool


class Policy(Protocol):
    """Says with which codec a flow is packed; looks at what travels, and at the steps, to find out.

    ``turns``: the last choices that ran against each other; none where there was nothing to choose."""

    turns: tuple[Turn, ...]

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

    def end(self, messages: StepMessages, spans: Sequence[Span], seconds: float) -> None:
        """A step has ended; every rank calls this after every step."""
        ...


class Fixed:
    """One codec for everything but what is ``named``."""

    def __init__(self, codec: str, named: Named | None = None) -> None:
        self.name, self.named = codec, named or {}
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

    def end(self, messages: StepMessages, spans: Sequence[Span], seconds: float) -> None:
        """Nothing to decide."""


def wherever_masked(codec: str, flow: Flow) -> str:
    """``codec``, behind ``MASKED`` for a gradient if it can use a bitmap."""
    return codec if flow.way == "F" or not has_bitmap(codec) else MASKED + codec
