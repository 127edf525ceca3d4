"""Samples per second by link: a group of bars for each link, torch first, and the bound of the computation.

A slow link, a packed one and what is left to gain are seen at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...stages.files import save_picture
from .pipeline_rows import TORCH, title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From the palette of Okabe and Ito, which colour-blind readers tell apart.
GREY = "#7F7F7F"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_WIDTH = 0.8  # of a group; groups are 1 apart


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw ``results.json`` into a PNG."""
    save_picture(path, figure(results))


def figure(results: Mapping[str, Any]) -> Figure:
    """The picture as a matplotlib figure; links that could not be shaped are left out."""
    from matplotlib.figure import Figure

    links = list(dict.fromkeys(row["link"] for row in results["rows"]))
    sides = list(dict.fromkeys(map(_side, results["rows"])))
    made = Figure(figsize=(4.5 + 2.2 * len(links), 4.6), layout="constrained")
    axes = made.add_subplot()
    for row in results["rows"]:
        _bar(axes, row, group=links.index(row["link"]), sides=sides)
    bound = next((row["bound_samples_per_second"] for row in results["rows"]), None)
    if bound is not None:
        label = "computation alone (raw on loopback)"
        axes.axhline(bound, color="black", linewidth=1, linestyle="--", label=label)
    axes.set_xticks(range(len(links)), links)
    axes.set_xlabel("link between the ranks, each direction")
    axes.set_ylabel("samples per second (median)")
    axes.margins(y=0.12)
    axes.set_title(title(results), loc="left", fontsize=11, fontweight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    _legend(axes)
    return made


def _side(row: Mapping[str, Any]) -> str:
    if row["side"] == TORCH:
        return "torch 1F1B"
    extra = f", +{row['extra_in_flight']} in flight" if row["extra_in_flight"] else ""
    return f"{row['codec']}{extra}"


def _bar(axes: Axes, row: Mapping[str, Any], *, group: int, sides: Sequence[str]) -> None:
    """One bar with its number, and a line over what its runs ranged over."""
    width = _WIDTH / len(sides)
    place = group - _WIDTH / 2 + width * (sides.index(_side(row)) + 0.5)
    height, runs = row["samples_per_second"], row["samples_per_second_of_runs"]
    codecs = list(dict.fromkeys(side.split(",")[0] for side in sides[1:]))
    colour = GREY if row["side"] == TORCH else COLOURS[codecs.index(row["codec"]) % len(COLOURS)]
    style: dict[str, Any] = {"hatch": "//", "edgecolor": "white"} if row["extra_in_flight"] else {}
    label = _side(row) if group == 0 else None
    axes.bar(place, height, 0.92 * width, color=colour, linewidth=0, label=label, **style)
    axes.vlines(place, min(runs), max(runs), color="black", linewidth=0.8)
    axes.annotate(
        f"{height:.0f}" if height >= 10 else f"{height:.1f}",
        (place, max(runs)),
        xytext=(0, 2),
        textcoords="offset points",
        ha="center",
        fontsize=7.5,
    )


def _legend(axes: Axes) -> None:
    if not axes.get_legend_handles_labels()[0]:
        return  # nothing was raced
    axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.0, 1.0))
