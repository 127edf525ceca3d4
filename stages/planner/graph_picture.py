"""The picture of the dependencies: layers as boxes in columns by stage, data as circles that grow with their
bytes; down the page goes the forward, up the backward."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..files import save_picture
from ..units import show_bytes
from .dependencies import Dependencies
from .graph_drawing import GRADIENT, SAVED, VALUE, WEIGHT_GRADIENT, Arrow, Circle, Drawing, drawing
from .graph_routes import HIGH, PITCH, WIDE, Place, columns, route
from .plan_picture import BACKWARD, FORWARD, LINE, RANKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES: Mapping[str, Mapping[str, Any]] = {
    "forward data": {"color": FORWARD, "linestyle": "solid", "linewidth": 1.0},
    "backward data": {"color": BACKWARD, "linestyle": "dashed", "linewidth": 1.0},
    "compute": {"color": LINE, "linestyle": "dotted", "linewidth": 1.2},
}
# By slot: where it lies beside its box, its colour (of Okabe and Ito), what the legend says of it.
SLOTS: Mapping[str, tuple[float, float, str, str]] = {
    VALUE: (-0.45, -0.5, "#56B4E9", "value"),
    GRADIENT: (0.45, -0.5, "#F0E442", "gradient of a value"),
    SAVED: (1.95, 0.0, "#009E73", "saved inside"),
    "parameter": (-1.95, 0.0, "#0072B2", "parameters"),
    WEIGHT_GRADIENT: (-2.65, 0.0, "#D55E00", "gradients of parameters"),
    "optimizer": (-3.35, 0.0, "#CC79A7", "optimizer state, old versions"),
    "buffer": (2.75, 0.0, "#999999", "buffers"),
}


def draw(path: str | Path, found: Dependencies, stages: Sequence[int], *, title: str) -> None:
    """Draw the dependencies into a PNG; ``stages``: of each layer, its stage."""
    save_picture(path, figure(drawing(found, stages), title=title))


def figure(drawn: Drawing, *, title: str) -> Figure:
    """Boxes in columns, the first stage on the left; arrows of three styles, and a legend."""
    from matplotlib.figure import Figure  # takes a second to import, and only a drawing needs it

    places = columns([box.stage for box in drawn.boxes])
    heads = {box.stage: place for box, place in reversed([*zip(drawn.boxes, places, strict=True)])}
    last = max(x for x, _ in places)
    deepest = -min(y for _, y in places)
    made = Figure(
        figsize=(max(7.0, 5.2 * (last / PITCH + 1)), 2.2 + 0.62 * (deepest + 1)), layout="constrained"
    )
    axes = made.subplots()
    axes.set_xlim(-4.3, last + 3.7)
    axes.set_ylim(-deepest - 0.95, 1.5)
    axes.axis("off")
    for stage, (x, _) in heads.items():
        axes.text(x, 1.15, f"stage {stage}", ha="center", va="center", fontsize=12, fontweight="bold")
    centres = [_centre(circle, places) for circle in drawn.circles]
    for arrow in drawn.arrows:
        _draw_arrow(axes, arrow, route(arrow, places, centres))
    _draw_boxes(axes, drawn, places)
    _draw_circles(axes, drawn.circles, centres)
    _legend(axes, made)
    made.suptitle(title, fontsize=11, fontweight="bold")
    return made


def _centre(circle: Circle, places: Sequence[Place]) -> Place:
    """Beside its box; an input of the model lies over the box that reads it first."""
    (x, y), (right, up, _, _) = places[circle.box], SLOTS[circle.slot]
    return x + right, y + (-up if circle.is_input else up)


def _draw_boxes(axes: Axes, drawn: Drawing, places: Sequence[Place]) -> None:
    from matplotlib.patches import FancyBboxPatch

    for number, (box, (x, y)) in enumerate(zip(drawn.boxes, places, strict=True)):
        look: Any = {"boxstyle": "round,pad=0,rounding_size=0.06", "fc": RANKS[box.stage % 2], "ec": LINE}
        corner = (x - WIDE, y - HIGH)
        axes.add_patch(FancyBboxPatch(corner, 2 * WIDE, 2 * HIGH, gid=f"box {number}", zorder=3, **look))
        count = len(box.layers)
        name = _fitting(box.name if count == 1 else f"{box.name} ({count})")
        axes.text(x, y, name, ha="center", va="center", fontsize=7.5, family="monospace", zorder=4)


def _fitting(name: str) -> str:
    """A name short enough for its box; its end tells more than its start."""
    return name if len(name) <= 22 else f"..{name[-20:]}"


def _draw_circles(axes: Axes, circles: Sequence[Circle], centres: Sequence[Place]) -> None:
    most = max((circle.num_bytes for circle in circles), default=1) or 1
    sizes = [12 + 150 * math.sqrt(circle.num_bytes / most) for circle in circles]
    axes.scatter(
        [x for x, _ in centres],
        [y for _, y in centres],
        s=sizes,
        c=[SLOTS[circle.slot][2] for circle in circles],
        edgecolors=LINE,
        linewidths=0.5,
        zorder=4,
    )
    for circle, (x, y) in zip(circles, centres, strict=True):
        right = circle.slot == GRADIENT
        if circle.slot in (VALUE, GRADIENT):
            side: Any = {"ha": "left" if right else "right", "va": "center"}
            x = x + 0.16 if right else x - 0.16
        else:
            side, y = {"ha": "center", "va": "top"}, y - 0.14
        axes.text(x, y, show_bytes(circle.num_bytes), fontsize=5.5, color=LINE, zorder=5, **side)


def _draw_arrow(axes: Axes, arrow: Arrow, points: Sequence[Place]) -> None:
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Line

    axes.add_patch(
        FancyArrowPatch(
            path=Line(points), arrowstyle="-|>", mutation_scale=7, zorder=2, fill=False, **STYLES[arrow.style]
        )
    )


def _legend(axes: Axes, made: Figure) -> None:
    from matplotlib.lines import Line2D

    look: Any = {"linestyle": "none", "marker": "o", "markersize": 6, "markeredgecolor": LINE}
    lines = [Line2D([], [], label=name, **style) for name, style in STYLES.items()]
    dots = [
        Line2D([], [], label=told, markerfacecolor=colour, **look) for _, _, colour, told in SLOTS.values()
    ]
    made.legend(handles=[*lines, *dots], loc="outside lower center", ncols=5, frameon=False, fontsize=8)
