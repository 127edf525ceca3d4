"""Span of an instruction: its beginning and end, waits, packing time and bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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


def bubbles(spans: Sequence[Span], *, num_ranks: int) -> tuple[float, ...]:
    """For every rank the share of the step, from 0 to the last span's end, in which it computes nothing."""
    seconds = max((span.end for span in spans), default=0.0)
    busy = [0.0] * num_ranks
    for span in spans:
        busy[span.rank] += span.computing
    return tuple(1 - one / seconds if seconds else 0.0 for one in busy)
