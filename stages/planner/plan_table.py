"""The stages of a plan as a table for people: a heading, a row for each stage, and how to read it."""

from __future__ import annotations

from collections.abc import Sequence

from ..units import show_bytes, show_count, show_seconds
from .plan_stage import PlanStage

_HEADINGS = ("stage", "rank", "layers", "parameters", "forward", "backward", "memory", "sent down", "sent up")
_FOOTNOTE = "predicted per micro-batch; memory for all micro-batches in flight; sent: tensors before packing"


def table(stages: Sequence[PlanStage]) -> list[str]:
    """The lines of the table."""
    rows = [_HEADINGS, *map(_row, range(len(stages)), stages)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust if heading == "layers" else str.rjust for heading in _HEADINGS]
    lines = (
        "  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths, strict=True))
        for row in rows
    )
    return [*map(str.rstrip, lines), _FOOTNOTE]


def _row(number: int, stage: PlanStage) -> tuple[str, ...]:
    layers = stage.layers[0] if len(stage.layers) == 1 else f"{stage.layers[0]} .. {stage.layers[-1]}"
    return (
        str(number),
        ",".join(map(str, stage.ranks)),
        f"{layers} ({len(stage.layers)})",
        show_count(stage.num_parameters),
        show_seconds(stage.forward_seconds),
        show_seconds(stage.backward_seconds),
        show_bytes(stage.memory_bytes),
        show_bytes(stage.bytes_forward) if stage.bytes_forward else "-",
        show_bytes(stage.bytes_backward) if stage.bytes_backward else "-",
    )
