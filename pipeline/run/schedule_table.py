"""The table of ``penstock plan schedule=all``: a line for each schedule, and what a reader should know of it.

Whoever chooses sees what the choice costs: seconds on one side, memory and versions on the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from ...stages.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from .schedule_comparison import Comparison

COLUMNS = ("schedule", "weights", "step", "samples/s", "bubble", "in flight", "versions", "memory", "")


def table(found: Comparison) -> Table:
    """Return one row per schedule that suits, the chosen one marked."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        made.add_column(
            name, justify="left" if name in ("schedule", "weights", "") else "right", no_wrap=True
        )
    best = found.chosen
    for one in found.candidates:
        made.add_row(
            one.plan.schedule,
            one.plan.weights,
            show_seconds(one.seconds),
            f"{found.num_samples / one.seconds:.0f}",
            f"{one.bubble:.0%}",
            str(max(one.live_micro_batches)),
            str(max(one.live_versions)),
            show_bytes(max(one.memory)),
            "<- chosen" if one is best else "" if one.fits else "too large",
        )
    return made


def notes(found: Comparison) -> list[str]:
    """Return what stands below: the schedules left out, and how to read the numbers."""
    lines = [f"left out: {name}: {reason}" for name, reason in found.left_out.items()]
    lines.append("simulated from measured layers; I and W: half of a backward each; tensors travel unpacked")
    lines.append("memory: of the fullest rank; in flight, versions: of the fullest stage")
    if any(one.plan.streams for one in found.candidates):
        lines.append(
            "async_1f1b, double_buffered: no flush, not the bits of the plain loop; never chosen here"
        )
    return lines
