"""What all pictures of a bench share: panels, bars with the range of their runs, names and a legend.

Pictures that look alike are read side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From the palette of Okabe and Ito, which colour-blind readers tell apart.
SPEED = "samples per second (median)"
GREY, COLOURS = "#7F7F7F", ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")


class Bars(NamedTuple):
    """One bar in each group, or none where its height is None; ``runs``: what each is the median of."""

    label: str | Sequence[str]
    colour: str | Sequence[str]
    heights: Sequence[float | None]
    runs: Sequence[Any] | None = None
    hatch: str | None = None


def colour(number: int) -> str:
    """The colour of the side ``number``."""
    return COLOURS[number % len(COLOURS)]


def panels(
    count: int, *, size: tuple[float, float], columns: int = 0, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of ``size`` inches with ``count`` axes in rows of ``columns`` (0: all in one row)."""
    from matplotlib.figure import Figure

    made, columns = Figure(figsize=size, layout="constrained"), columns or max(1, count)
    axes = list(made.subplots(max(1, ceil(count / columns)), columns, squeeze=False, **options).flat)
    for empty in axes[count:]:
        empty.set_axis_off()
    return made, axes


def name(axes: Axes, title: str = "", *, x: str = "", y: str) -> None:
    """Write the title and what the axes show."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)


def bars(
    axes: Axes, groups: Sequence[str], sides: Sequence[Bars], *, form: str | Callable[[float], str]
) -> None:
    """Draw a group of bars over each name, numbers above, and a line over what the runs ranged over."""
    width = 0.8 / max(1, len(sides))
    for number, side in enumerate(sides):
        there = [i for i, height in enumerate(side.heights) if height is not None]
        heights: list[Any] = [side.heights[i] for i in there]
        options: dict[str, Any] = {"hatch": side.hatch, "edgecolor": "white", "linewidth": 0}
        if side.runs is not None:
            ends = [
                (h - min(side.runs[i]), max(side.runs[i]) - h) for i, h in zip(there, heights, strict=True)
            ]
            options |= {"yerr": list(zip(*ends, strict=True)), "error_kw": {"elinewidth": 0.8}}
        places = [group - 0.4 + width * (number + 0.5) for group in there]
        made = axes.bar(places, heights, 0.92 * width, color=side.colour, label=side.label, **options)
        axes.bar_label(made, fmt=form, fontsize=8, padding=2)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.15)
    legend(axes)


def speed(height: float) -> str:
    """A number of samples per second as it stands above a bar."""
    return f"{height:.0f}" if height >= 10 else f"{height:.1f}"


def legend(axes: Axes) -> None:
    """Write what the colours mean beside the axes, if there are any."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.0, 1.0))
