"""What a step tells: the loss, the seconds, and per stage what it computed, waited for and sent."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..stages.units import show_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """One stage in one step: bytes it sent downstream and upstream, unpacked and packed; bytes that its
    forwards saved and a store kept for the backwards; seconds."""

    forward_raw: int = 0
    forward_sent: int = 0
    backward_raw: int = 0
    backward_sent: int = 0
    saved_raw: int = 0
    saved_kept: int = 0
    compute_seconds: float = 0.0
    waiting_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One step; the same on every rank but for ``seconds``, which each rank measures itself, and for
    ``outputs``: the model's on the batch, if they were asked for, where the last stage is."""

    step: int
    loss: float
    seconds: float
    num_samples: int
    stages: tuple[StageReport, ...]
    outputs: Any = None

    @property
    def bytes_raw(self) -> int:
        """Bytes of all tensors passed between stages, both directions, unpacked."""
        return sum(stage.forward_raw + stage.backward_raw for stage in self.stages)

    @property
    def bytes_sent(self) -> int:
        """Bytes of all frames passed between stages, both directions, headers included."""
        return sum(stage.forward_sent + stage.backward_sent for stage in self.stages)

    def __str__(self) -> str:
        ratio = f" ({self.bytes_raw / self.bytes_sent:.2f}x)" if self.bytes_sent else ""
        work = f"loss {self.loss:.4f}, {self.num_samples} samples in {self.seconds:.3f} s"
        sent = f"{show_bytes(self.bytes_raw)} between stages sent as {show_bytes(self.bytes_sent)}{ratio}"
        return f"step {self.step}: {work}, {sent}"
