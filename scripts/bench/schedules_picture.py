"""Every schedule at a glance: bars of samples per second, ours and the rival's, dots for the bubbles below.

Speed and bubble stand over each other, since the one is to explain the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...stages.files import save_picture
from .pipeline_picture import COLOURS, GREY
from .schedules_rows import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OURS, PALE = COLOURS[0], COLOURS[4]
_WIDTH = 0.38


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw ``results.json`` into a PNG."""
    save_picture(path, figure(results))


def figure(results: Mapping[str, Any]) -> Figure:
    """The picture as a matplotlib figure: speeds above, bubbles of the ranks below."""
    from matplotlib.figure import Figure

    rows = results["rows"]
    made = Figure(figsize=(3.5 + 1.15 * len(rows), 6.4), layout="constrained")
    speeds, bubbles = made.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _bars(speeds, rows)
    _dots(bubbles, rows)
    bubbles.set_xticks(range(len(rows)), [_label(row) for row in rows], fontsize=9)
    speeds.set_title(title(results), loc="left", fontsize=11, fontweight="bold")
    for axes in (speeds, bubbles):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return made


def _label(row: Mapping[str, Any]) -> str:
    policy = f"\n{row['weights']}" if row["weights"] != "latest" and row["weights"] != row["name"] else ""
    return f"{row['name']}{policy}\n{row['num_stages']} stages"


def _bars(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """Ours beside the rival's: torch grey, another of ours pale; a line over what the runs ranged over."""
    sides = (
        ("penstock", "", OURS, -1, rows),
        ("torch, the same schedule and cut", "rival_", GREY, 1, [r for r in rows if r["rival_class"]]),
        (
            "penstock 1f1b or gpipe, a stage a rank",
            "rival_",
            PALE,
            1,
            [r for r in rows if not r["rival_class"]],
        ),
    )
    for label, prefix, colour, side, chosen in sides:
        places = [rows.index(row) + side * _WIDTH / 2 for row in chosen]
        heights = [row[f"{prefix}samples_per_second"] for row in chosen]
        axes.bar(places, heights, 0.94 * _WIDTH, color=colour, label=label if chosen else None)
        for place, height, row in zip(places, heights, chosen, strict=True):
            runs = row[f"{prefix}samples_per_second_of_runs"]
            axes.vlines(place, min(runs), max(runs), color="black", linewidth=0.8)
            above = {"xytext": (0, 2), "textcoords": "offset points", "ha": "center", "fontsize": 8}
            axes.annotate(f"{height:.0f}", (place, max(runs)), **above)
    axes.set_ylabel("samples per second (median)")
    axes.margins(y=0.1)


def _dots(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """A full dot for the measured bubble of each rank, an empty one for the simulated."""
    num_ranks = max((len(row["bubble"]) for row in rows), default=0)
    for rank in range(num_ranks):
        places = [number + 0.22 * (rank - (num_ranks - 1) / 2) for number in range(len(rows))]
        colour = COLOURS[(rank + 1) % len(COLOURS)]
        measured = [100 * row["bubble"][rank] for row in rows]
        on_paper = [100 * row["bubble_simulated"][rank] for row in rows]
        axes.scatter(places, measured, color=colour, s=34, label=f"rank {rank}, measured", zorder=3)
        axes.scatter(
            places,
            on_paper,
            s=34,
            label=f"rank {rank}, simulated",
            zorder=3,
            facecolor="none",
            edgecolor=colour,
        )
        for pair in zip(places, measured, on_paper, strict=True):
            axes.vlines(pair[0], *sorted(pair[1:]), color=colour, linewidth=0.8)
    axes.set_ylabel("bubble, % of a step")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#E4E7EB", linewidth=0.8)
    axes.set_axisbelow(True)
