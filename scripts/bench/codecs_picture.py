"""Ratio against speed, a panel for each class of tensors: what a codec costs, and what it brings.

A codec is worth its time only where it lies to the right of the link; the table alone does not show that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ...stages.files import save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From the palette of Okabe and Ito, which colour-blind readers tell apart; the others are greys.
_COLOURS = ("#000000", "#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#B8A900")
_GREYS = ("#555555", "#777777", "#999999", "#BBBBBB")
_MARKERS = ("v", "^", "<", ">")
_COLUMNS = 3
_MOST_RATIO = 64  # a tensor of nearly nothing but zeros would press all others to the floor


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw ``results.json`` into a PNG."""
    save_picture(path, figure(results))


def figure(results: Mapping[str, Any]) -> Figure:
    """The picture as a matplotlib figure."""
    from matplotlib.figure import Figure

    rows = results["rows"]
    kinds = list(dict.fromkeys(row["class"] for row in rows))
    styles = _styles(rows)
    num_columns = min(_COLUMNS, max(1, len(kinds)))
    num_rows = max(1, ceil(len(kinds) / num_columns))
    made = Figure(figsize=(4.6 * num_columns, 4.0 * num_rows + 1.2), layout="constrained")
    panels = list(made.subplots(num_rows, num_columns, squeeze=False).flat)
    for axes, kind in zip(panels, kinds, strict=False):
        _panel(axes, [row for row in rows if row["class"] == kind], styles)
        axes.set_title(kind, loc="left", fontsize=11, fontweight="bold")
    for axes in panels[len(kinds) :]:
        axes.set_axis_off()
    handles = {handle.get_label(): handle for axes in made.axes for handle in axes.collections}
    named = [handles[name] for name in styles if name in handles]
    made.legend(
        handles=named, loc="outside lower center", ncols=min(6, max(1, len(named))), frameon=False, fontsize=9
    )
    return made


def _styles(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Colour and marker of each codec: a dot for ours, a triangle for the others."""
    ours = dict.fromkeys(row["codec"] for row in rows if row["by"] == "penstock")
    others = dict.fromkeys(row["codec"] for row in rows if row["by"] == "others")
    styles = {name: {"color": _COLOURS[i % len(_COLOURS)], "marker": "o"} for i, name in enumerate(ours)}
    for i, name in enumerate(others):
        styles[name] = {"color": _GREYS[i % len(_GREYS)], "marker": _MARKERS[i % len(_MARKERS)]}
    return styles


def _panel(axes: Axes, rows: Sequence[Mapping[str, Any]], styles: Mapping[str, Mapping[str, Any]]) -> None:
    """Every tensor a faint dot, the median of a codec's tensors a strong one."""
    for name, style in styles.items():
        points = [(_speed(row), min(row["ratio"], _MOST_RATIO)) for row in rows if row["codec"] == name]
        if not points:
            continue
        x, y = zip(*points, strict=True)
        axes.scatter(x, y, s=12, alpha=0.35, linewidths=0, **style)
        axes.scatter([median(x)], [median(y)], s=70, edgecolors="white", linewidths=0.8, zorder=3, label=name,
                     **style)  # fmt: skip
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("pack and unpack, as a multiple of two copies' speed", fontsize=9)
    axes.set_ylabel("ratio, before / after", fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _speed(row: Mapping[str, Any]) -> float:
    return 2 * row["copy"] / (row["pack"] + row["unpack"])
