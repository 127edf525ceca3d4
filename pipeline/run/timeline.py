"""Pictures of a step: a PNG with one row per rank, and a trace for ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...stages.files import save_picture
from ..schedules.instruction import Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# Blue and the warm colours from the palette of Okabe and Ito, which colour-blind readers tell apart. Warm is
# backward, whole or in halves; printed in grey, the five are 30 of 255 apart.
COLOURS = {"F": "#0072B2", "B": "#E69F00", "I": "#DC6A1A", "W": "#F0E442", "U": "#404040"}
INK = {"F": "white", "B": "black", "I": "black", "W": "black", "U": "white"}
NAMES = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights", "U": "update"}
WAITING = {"facecolor": "#F1F3F5", "edgecolor": "#B4BAC3", "hatch": "////", "linewidth": 0}
ROW = 0.84  # height of a rank's row; the rows are 1 apart
LANE_INCHES = 0.3  # least height of one of several stages in the row of their rank
ROW_INCHES = 0.65
MOST_INCHES = 30.0  # of all rows together; more of them get thinner


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One timeline of a picture: its heading, bold if it is ``marked``, and its spans between two moments."""

    title: str
    spans: Sequence[Span]
    begin: float = 0.0
    end: float | None = None
    marked: bool = False

    @property
    def seconds(self) -> float:
        """Seconds that it lasts."""
        last = max((span.end for span in self.spans), default=1e-3) if self.end is None else self.end
        return last - self.begin

    @property
    def stages_of_rank(self) -> list[list[int]]:
        """The stages in the row of every rank, ascending."""
        num_ranks = 1 + max((span.rank for span in self.spans), default=0)
        return [sorted({span.stage for span in self.spans if span.rank == rank}) for rank in range(num_ranks)]

    @property
    def bubble(self) -> list[float]:
        """For every rank the share of the panel in which it computes nothing."""
        busy, last = [0.0] * len(self.stages_of_rank), self.begin + self.seconds
        for span in self.spans:
            busy[span.rank] += max(0.0, min(span.end, last) - max(span.start + span.waiting, self.begin))
        return [1 - one / self.seconds for one in busy]


def draw(panels: Sequence[Panel], path: str | Path, *, title: str) -> None:
    """Draw timelines, one above the other on the same axis, into a PNG wide enough for the top of a page."""
    save_picture(path, figure(panels, title=title))


def figure(panels: Sequence[Panel], *, title: str) -> Figure:
    """The picture: a box per span, what it waited in front of it, legend and axis."""
    from matplotlib.figure import Figure  # takes a second to import, and only a drawing needs it
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    stages = [panel.stages_of_rank for panel in panels]
    heights = [sum(max(ROW_INCHES, LANE_INCHES * len(row)) for row in ranks) for ranks in stages]
    heights = [height * min(1.0, MOST_INCHES / sum(heights)) for height in heights]
    size = 13, 1.3 + sum(heights) + 0.42 * len(panels)
    picture = Figure(figsize=size, layout=ConstrainedLayoutEngine(hspace=0.02))
    rows = picture.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    end = max(panel.seconds for panel in panels)
    for axes, panel in zip(rows, panels, strict=True):
        _draw_panel(axes, panel, end=end)
        axes.tick_params(axis="x", bottom=axes is rows[-1])
        axes.spines["bottom"].set_visible(axes is rows[-1])
    rows[-1].set_xlabel("milliseconds since the step began", loc="left", fontsize=10)
    _draw_legend(rows[-1], [span for panel in panels for span in panel.spans])
    picture.suptitle(title, x=0.005, ha="left", fontsize=12.5, fontweight="bold")
    return picture


def _draw_panel(axes: Axes, panel: Panel, *, end: float) -> None:
    """Draw one row per rank, rank 0 on top, with the share of the step in which it computed."""
    stages_of_rank, names = panel.stages_of_rank, []
    for rank, (stages, idle) in enumerate(zip(stages_of_rank, panel.bubble, strict=True)):
        axes.axhspan(rank - ROW / 2, rank + ROW / 2, color="#FAFBFC", zorder=0)  # what stays is the bubble
        in_a_row = len(stages) > 1 and stages[-1] - stages[0] == len(stages) - 1
        listed = f"{stages[0]}-{stages[-1]}" if in_a_row else ", ".join(map(str, stages))
        name = f"stage{'s' * (len(stages) > 1)} {listed}" if stages else "idle"
        names.append(f"rank {rank}, {name}\n{100 - 100 * idle:.0f} % busy")
    for span in panel.spans:
        if span.end > panel.begin and span.start < panel.begin + panel.seconds:
            _draw_span(axes, span, panel, end=end, stages=stages_of_rank[span.rank])
    axes.axvline(1e3 * panel.seconds, color="#5B6470", linewidth=1, zorder=0)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1e3 * end * 1.002)
    axes.tick_params(axis="y", length=0, labelsize=9.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    weight = "bold" if panel.marked else "normal"
    axes.set_title(panel.title, loc="left", fontsize=10.5, pad=4, fontweight=weight)


def _draw_span(axes: Axes, span: Span, panel: Panel, *, end: float, stages: list[int]) -> None:
    """Draw the box in the lane of its stage, the wait before it, and the number of the micro-batch, in ms."""
    from matplotlib.patches import Rectangle

    last = panel.begin + panel.seconds
    moments = (span.start, span.start + span.waiting, span.end)
    start, middle, stop = (1e3 * (min(max(moment, panel.begin), last) - panel.begin) for moment in moments)
    height = ROW / len(stages)
    bottom = span.rank - ROW / 2 + stages.index(span.stage) * height
    if middle > start:
        axes.add_patch(Rectangle((start, span.rank - ROW / 2), middle - start, ROW, **WAITING))
    if stop <= middle:
        return
    box = {"fc": COLOURS[span.op], "ec": "white", "lw": 0.8, "gid": span.name, "clip_on": True}
    axes.add_patch(Rectangle((middle, bottom), stop - middle, height, **box))
    label = span.op if span.micro_batch is None else str(span.micro_batch)
    if stop - middle > 1e3 * end * 0.0085 * len(label):  # else it would stand over its neighbours
        place = (middle + stop) / 2, bottom + height / 2
        size = 10 if len(stages) == 1 else 8.5
        axes.text(*place, label, color=INK[span.op], ha="center", va="center_baseline", fontsize=size)


def _draw_legend(axes: Axes, spans: Sequence[Span]) -> None:
    """Below the rows, at the right end of the axis label's line, so that the title may be long."""
    from matplotlib.patches import Patch
    from matplotlib.transforms import ScaledTranslation

    used = {span.op for span in spans if span.computing > 0}
    keys = [Patch(facecolor=COLOURS[op], label=NAMES[op]) for op in COLOURS if op in used]
    if any(span.waiting for span in spans):
        keys.append(Patch(label="waiting for a frame", **WAITING))
    figure = axes.get_figure(root=True)
    assert figure is not None, "the axes were made by a figure"
    below = axes.transAxes + ScaledTranslation(0, -18 / 72, figure.dpi_scale_trans)
    place = {"loc": "upper right", "bbox_to_anchor": (1, 0), "bbox_transform": below, "borderaxespad": 0}
    axes.legend(handles=keys, ncols=max(1, len(keys)), frameon=False, fontsize=10, **place)


# A frame goes to a neighbouring stage, and is read there by one of these instructions.
WAYS = {"F": (1, "sent down"), "B": (-1, "sent up"), "I": (-1, "sent up")}
READERS = {"F": ("F",), "B": ("B", "I"), "I": ("B", "I")}

Event = dict[str, Any]


def perfetto_trace(spans: Sequence[Span], *, title: str) -> dict[str, Any]:
    """The spans of a step as the JSON object of a trace.

    A process is a rank, its rows are its stages; in them an instruction stands behind what it waited. Two
    more rows show the frames: each from the moment at which it was sent, and the one before it was taken, to
    the moment at which its reader took it. Every rank has a clock of its own, which begins with the step.
    """
    ordered = sorted(spans, key=lambda span: (span.rank, span.start))
    num_stages = 1 + max((span.stage for span in ordered), default=0)
    events: list[Event] = []
    rows = {(span.rank, span.stage): f"stage {span.stage}" for span in ordered}
    # 1. instructions, each behind what it waited for
    for span in ordered:
        begun = span.start + span.waiting
        if span.waiting > 0:
            times = (span.start, begun)
            events.append(_event(span.rank, span.stage, "wait", "waiting", *times, {"for": span.name}))
        args: Event = {"waiting_seconds": span.waiting, "packing_seconds": span.packing}
        args |= {} if span.micro_batch is None else {"micro_batch": span.micro_batch}
        kind = NAMES[span.op]
        events.append(_event(span.rank, span.stage, span.name, kind, begun, span.end, args | _bytes(span)))
    # 2. frames, and an arrow from the instruction that sent one to the one that took it
    for sender, reader, begun, taken in _frames(ordered):
        row, name = num_stages + (sender.op != "F"), f"{sender.name} to stage {reader.stage}"
        rows[sender.rank, row] = WAYS[sender.op][1]
        events.append(_event(sender.rank, row, name, "frame", begun, taken, _bytes(sender)))
        arrow = {"name": name, "cat": "frame", "id": f"{sender.name}>{reader.stage}"}
        (_, left), (first, last) = _inside(sender), _inside(reader)
        if left <= last:  # else the clocks of the ranks are too far apart for an arrow
            events.append({**arrow, "ph": "s", "pid": sender.rank, "tid": sender.stage, "ts": left})
            end = {"ph": "f", "bp": "e", "pid": reader.rank, "tid": reader.stage, "ts": max(left, first)}
            events.append(arrow | end)
    # 3. names of processes and rows
    named = [("process", rank, 0, f"rank {rank}", rank) for rank in sorted({span.rank for span in ordered})]
    named += [("thread", rank, row, name, row) for (rank, row), name in sorted(rows.items())]
    names: list[Event] = []
    for kind, rank, row, name, order in named:
        place = {"ph": "M", "pid": rank, "tid": row}
        names.append(place | {"name": f"{kind}_name", "args": {"name": name}})
        names.append(place | {"name": f"{kind}_sort_index", "args": {"sort_index": order}})
    return {"displayTimeUnit": "ms", "otherData": {"title": title}, "traceEvents": [*names, *events]}


def _event(rank: int, row: int, name: str, kind: str, start: float, end: float, args: Event) -> Event:
    place = {"ph": "X", "pid": rank, "tid": row, "name": name, "cat": kind}
    return {**place, **_times(start, end), "args": args}


def _times(start: float, end: float) -> dict[str, float]:
    """In microseconds, to the nanosecond; the end of an event is the start of the next to the last digit."""
    first, last = round(1e9 * start), round(1e9 * end)
    return {"ts": first / 1e3, "dur": (last - first) / 1e3}


def _inside(span: Span) -> tuple[float, float]:
    """Moments in microseconds just after the beginning and just before the end of an instruction's event."""
    times = _times(span.start + span.waiting, span.end)
    little = min(1.0, times["dur"] / 4)
    return times["ts"] + little, times["ts"] + times["dur"] - little


def _bytes(span: Span) -> Event:
    if not span.bytes_sent:
        return {}
    sent = {"bytes_raw": span.bytes_raw, "bytes_sent": span.bytes_sent}
    return sent | {"ratio": span.bytes_raw / span.bytes_sent} | ({"codec": span.codec} if span.codec else {})


def _frames(spans: Sequence[Span]) -> Iterator[tuple[Span, Span, float, float]]:
    """Yield sender and reader of every frame between ranks, since when it was the next to be taken, and when
    it was; a rank takes them in order."""
    by_name = {(span.stage, span.op, span.micro_batch): span for span in spans}
    free: dict[tuple[int, str], float] = {}
    for sender in sorted(spans, key=lambda span: span.end):
        if not sender.bytes_sent or sender.op not in WAYS:
            continue
        step, way = WAYS[sender.op]
        places = [(sender.stage + step, op, sender.micro_batch) for op in READERS[sender.op]]
        reader = next((by_name[place] for place in places if place in by_name), None)
        if reader is None or reader.rank == sender.rank:
            continue
        begun = max(sender.end, free.get((sender.rank, way), 0.0))
        taken = free[sender.rank, way] = max(begun, reader.start + reader.waiting)
        yield sender, reader, begun, taken
