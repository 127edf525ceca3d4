"""The picture of the idea: a network cut in two, frames on the cut, and the step as 1F1B runs it.

    python -m penstock.scripts.concept docs/concept.png

Who has never cut a network should see in one look what travels and what runs at once. The timeline is
the program of ``1f1b``, simulated: the picture cannot tell of another order than the one that runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from ..pipeline.run.timeline import COLOURS, INK, WAITING
from ..pipeline.schedules.instruction import Op
from ..pipeline.schedules.simulate import outline, simulate
from ..pipeline.schedules.synchronous import one_f_one_b
from ..stages.files import save_picture

SIZE = 10.0, 5.3  # inches
LINE, GREY, RANK = "#404040", "#5B6470", "#EEF1F4"
LAYERS = ("conv1", "layer1", "layer2"), ("layer3", "layer4", "fc, loss")
NUM_MICRO_BATCHES = 4
SECONDS = {Op.F: 1.0, Op.B: 2.0}  # a backward takes about two forwards
LEFT, RIGHT = 1.35, 9.75  # of the timeline
ROW = 0.52


def main(arguments: Sequence[str]) -> int:
    """Draw the picture into the path that ``arguments`` hold."""
    (path,) = arguments
    save_picture(path, figure())
    return 0


def figure() -> Figure:
    """The cut network above, its step below; one unit of the axes is one inch."""
    # Dark text: on a dark page the picture keeps its own ground.
    made = Figure(figsize=SIZE, facecolor="white")
    axes = made.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, SIZE[0]), ylim=(0, SIZE[1]))
    axes.axis("off")
    _draw_stage(axes, 0, left=0.25)
    _draw_stage(axes, 1, left=6.65)
    _draw_frame(axes, "activations", "F", y=4.12, start=3.45, end=6.55)
    _draw_frame(axes, "gradients", "B", y=3.15, start=6.55, end=3.45)
    packed = "all that crosses is packed, bit for bit\n(dashed: its size before)"
    _text(axes, 5.0, 4.96, packed, color=GREY)
    _draw_step(axes)
    return made


def _draw_stage(axes: Axes, number: int, *, left: float) -> None:
    _box(axes, left, 2.72, 3.1, 1.85, face=RANK)
    _text(axes, left + 1.55, 4.78, f"stage {number} on rank {number}", weight="bold")
    for place, name in enumerate(LAYERS[number]):
        _box(axes, left + 0.15 + 0.96 * place, 3.05, 0.88, 1.2, face="white")
        _text(axes, left + 0.59 + 0.96 * place, 3.65, name)


def _draw_frame(axes: Axes, what: str, op: str, *, y: float, start: float, end: float) -> None:
    """An arrow over the cut with a frame on it, inside the size that its tensor had before."""
    style = {"arrowstyle": "-|>,head_width=0.32,head_length=0.6", "lw": 3, "color": COLOURS[op]}
    axes.annotate("", xy=(end, y), xytext=(start, y), arrowprops=style)
    _box(axes, 3.95, y - 0.37, 2.1, 0.74, face="white", edge="--")
    _box(axes, 4.3, y - 0.26, 1.4, 0.52, face=COLOURS[op])
    _text(axes, 5.0, y, what, color=INK[op])


def _draw_step(axes: Axes) -> None:
    programs = outline(one_f_one_b([[0], [1]], NUM_MICRO_BATCHES))
    simulation = simulate(programs, work=lambda one: SECONDS[one.op], transfer=lambda message: 0.0)
    inches = (RIGHT - LEFT) / simulation.seconds
    heading = "one batch as four micro-batches: both ranks work at the same time (1F1B)"
    _text(axes, LEFT, 2.2, heading, side="left")
    bottoms = 1.4, 0.74
    for rank, bottom in enumerate(bottoms):
        _text(axes, 0.25, bottom + ROW / 2, f"rank {rank}", side="left", weight="bold")
        axes.add_patch(Rectangle((LEFT, bottom), RIGHT - LEFT, ROW, **WAITING))
    for span in simulation.spans:
        left, width = LEFT + inches * (span.start + span.waiting), inches * span.computing
        style = {"facecolor": COLOURS[span.op], "edgecolor": "white", "linewidth": 1.5}
        axes.add_patch(Rectangle((left, bottoms[span.rank]), width, ROW, **style))
        _text(axes, left + width / 2, bottoms[span.rank] + ROW / 2, span.name[1:], color=INK[span.op])
    key = "F forward, B backward of a micro-batch; hatched: waiting, the bubble"
    _text(axes, LEFT, 0.35, key, side="left", color=GREY)
    axes.annotate("", xy=(RIGHT, 0.35), xytext=(8.95, 0.35), arrowprops={"arrowstyle": "->", "color": GREY})
    _text(axes, 8.85, 0.35, "time", side="right", color=GREY)


def _box(axes: Axes, x: float, y: float, width: float, height: float, *, face: str, edge: str = "-") -> None:
    shape = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, fc=face, ec=LINE, ls=edge))


def _text(axes: Axes, x: float, y: float, text: str, *, side: str = "center", **style: Any) -> None:
    axes.text(x, y, text, **{"ha": side, "va": "center", "fontsize": 12, "color": LINE} | style)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
