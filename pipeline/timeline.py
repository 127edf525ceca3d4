"""The picture of a step: one row per rank, one box per instruction, with the durations that were measured.

People look at pictures before they read tables: a bubble, a slow stage or a wait for a link is seen at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# From the palette of Okabe and Ito, which colour-blind readers tell apart; their greys differ as well.
COLOURS = {"F": "#0072B2", "B": "#E69F00", "U": "#009E73"}
INK = {"F": "white", "B": "black", "U": "white"}
NAMES = {"F": "forward", "B": "backward", "U": "update"}
WAITING = {"facecolor": "#F1F3F5", "edgecolor": "#B4BAC3", "hatch": "////", "linewidth": 0}
ROW = 0.8  # height of a box; the rows are 1 apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One instruction as it ran, in seconds since the step began; first it waited for ``waiting`` seconds.

    ``packing``: seconds of it in which frames were packed and unpacked."""

    rank: int
    stage: int
    op: str
    micro_batch: int | None
    start: float
    waiting: float
    end: float
    packing: float = 0.0


def draw(spans: Sequence[Span], path: str | Path, *, title: str) -> None:
    """Draw the spans into a PNG, wide enough for the top of a page."""
    figure(spans, title=title).savefig(path, format="png", dpi=160)


def figure(spans: Sequence[Span], *, title: str) -> "Figure":
    """The picture as a matplotlib figure: a box per span, what it waited in front of it, legend and axis."""
    from matplotlib.figure import Figure  # takes a second to import, and only a drawing needs it

    stages_of_rank = _stages_of_rank(spans)
    end = max((span.end for span in spans), default=1e-3)
    made = Figure(figsize=(13, 1.2 + 0.65 * len(stages_of_rank)), layout="constrained")
    axes = made.add_subplot()
    for span in spans:
        _draw_span(axes, span, end=end, lane=stages_of_rank[span.rank].index(span.stage))
    _draw_axes(axes, spans, stages_of_rank, end=end)
    _draw_legend(axes, spans, several=any(len(stages) > 1 for stages in stages_of_rank))
    axes.set_title(title, loc="left", fontsize=12.5, fontweight="bold", pad=8)
    return made


def _stages_of_rank(spans: Sequence[Span]) -> list[list[int]]:
    num_ranks = 1 + max((span.rank for span in spans), default=0)
    return [sorted({span.stage for span in spans if span.rank == rank}) for rank in range(num_ranks)]


def _draw_span(axes: "Axes", span: Span, *, end: float, lane: int) -> None:
    """The box, what it waited before, and the number of the micro-batch; times in ms."""
    from matplotlib.patches import Rectangle

    start, middle, stop = 1e3 * span.start, 1e3 * (span.start + span.waiting), 1e3 * span.end
    bottom = span.rank - ROW / 2
    if middle > start:
        axes.add_patch(Rectangle((start, bottom), middle - start, ROW, **WAITING))
    name = f"{span.stage}{span.op}{'' if span.micro_batch is None else span.micro_batch}"
    colour = _lighter(COLOURS[span.op], lane)
    axes.add_patch(Rectangle((middle, bottom), stop - middle, ROW, fc=colour, ec="white", lw=0.8, gid=name))
    label = span.op if span.micro_batch is None else str(span.micro_batch)
    if stop - middle > 1e3 * end * 0.0085 * len(label):  # else it would stand over its neighbours
        ink = "black" if lane else INK[span.op]
        place = (middle + stop) / 2, span.rank
        axes.text(*place, label, color=ink, ha="center", va="center_baseline", fontsize=10)


def _lighter(colour: str, lane: int) -> tuple[float, ...]:
    """The colour of a rank's first stage, paler for each further one."""
    from matplotlib.colors import to_rgb

    return tuple(1 - (1 - part) * 0.62**lane for part in to_rgb(colour))


def _draw_axes(axes: "Axes", spans: Sequence[Span], stages_of_rank: list[list[int]], *, end: float) -> None:
    """One row per rank, rank 0 on top, with the share of the step in which it computed."""
    names = []
    for rank, stages in enumerate(stages_of_rank):
        shown = (
            f"stages {stages[0]}-{stages[-1]}"
            if len(stages) > 1
            else f"stage {stages[0]}"
            if stages
            else "idle"
        )
        busy = sum(span.end - span.start - span.waiting for span in spans if span.rank == rank)
        names.append(f"rank {rank}, {shown}\n{100 * busy / end:.0f} % busy")
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1e3 * end * 1.002)
    axes.set_xlabel("milliseconds since the step began", loc="left", fontsize=10)
    axes.tick_params(axis="y", length=0, labelsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_legend(axes: "Axes", spans: Sequence[Span], *, several: bool) -> None:
    """Below the rows, at the right end of the axis label's line, so that the title may be long."""
    from matplotlib.patches import Patch
    from matplotlib.transforms import ScaledTranslation

    used = {span.op for span in spans}
    keys = [Patch(facecolor=COLOURS[op], label=NAMES[op]) for op in COLOURS if op in used]
    if several:
        keys.append(Patch(facecolor="none", label="(paler: a later stage of the rank)"))
    keys.append(Patch(label="waiting for a frame", **WAITING))
    figure = axes.get_figure(root=True)
    assert figure is not None, "the axes were made by a figure"
    below = axes.transAxes + ScaledTranslation(0, -18 / 72, figure.dpi_scale_trans)
    place = {"loc": "upper right", "bbox_to_anchor": (1, 0), "bbox_transform": below, "borderaxespad": 0}
    axes.legend(handles=keys, ncols=len(keys), frameon=False, fontsize=10, **place)
