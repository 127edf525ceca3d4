"""timeline.json: a step as a trace that ui.perfetto.dev and chrome://tracing open, with durations and bytes.

A picture shows where a step waits; a trace lets a person zoom in, and says what every frame cost.

Source: the Trace Event Format: "X" complete events and "s"/"f" flow arrows with times in microseconds, "M"
        names of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..schedules.span import Span
from .timeline import NAMES

Event = dict[str, Any]
WAYS = {"F": (1, "sent down"), "B": (-1, "sent up"), "I": (-1, "sent up")}
READERS = {"F": ("F",), "B": ("B", "I"), "I": ("B", "I")}  # what the neighbour does with a frame


def trace(spans: Sequence[Span], *, title: str, facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The spans of a step as the JSON object of a trace.

    A process is a rank, its rows are its stages; in them an instruction stands behind what it waited. Two
    more rows show the frames: each from the moment at which it was sent, and the one before it was taken, to
    the moment at which its reader took it. Every rank has a clock of its own, which begins with the step.

    Args:    facts: whatever else a reader may want to know of the run.
    """
    ordered = sorted(spans, key=lambda span: (span.rank, span.start))
    rows = _Rows(num_stages=1 + max((span.stage for span in ordered), default=0))
    events = [event for span in ordered for event in _instruction(span)]
    frames = [event for frame in _frames(ordered) for event in _travel(frame, rows)]
    names = _names(ordered, frames, rows)
    return {
        "displayTimeUnit": "ms",
        "otherData": {"title": title, **(facts or {})},
        "traceEvents": [*names, *events, *frames],
    }


class _Rows(NamedTuple):
    """Which row of a rank is which: its stages by their number, then the frames down and up."""

    num_stages: int

    def way(self, op: str) -> int:
        return self.num_stages + (op != "F")


def _instruction(span: Span) -> Iterator[Event]:
    place = {"ph": "X", "pid": span.rank, "tid": span.stage}
    begun = span.start + span.waiting
    if span.waiting > 0:
        yield {
            **place,
            "name": "wait",
            "cat": "waiting",
            **_times(span.start, begun),
            "args": {"for": span.name},
        }
    args: dict[str, Any] = {"waiting_seconds": span.waiting, "packing_seconds": span.packing}
    if span.micro_batch is not None:
        args["micro_batch"] = span.micro_batch
    named = {"name": span.name, "cat": NAMES[span.op]}
    yield {**place, **named, **_times(begun, span.end), "args": args | _bytes(span)}


def _times(start: float, end: float) -> dict[str, float]:
    """In microseconds, to the nanosecond; the end of an event is the start of the next to the last digit."""
    first, last = round(1e9 * start), round(1e9 * end)
    return {"ts": first / 1e3, "dur": (last - first) / 1e3}


def _bytes(span: Span) -> dict[str, Any]:
    if not span.bytes_sent:
        return {}
    found = {"bytes_raw": span.bytes_raw, "bytes_sent": span.bytes_sent}
    return found | {"ratio": span.bytes_raw / span.bytes_sent} | ({"codec": span.codec} if span.codec else {})


class _Frame(NamedTuple):
    """What ``sender`` sent to ``reader``, and since when it was the next to be taken."""

    sender: Span
    reader: Span
    begun: float
    taken: float


def _frames(spans: Sequence[Span]) -> Iterator[_Frame]:
    """Every frame that passes from rank to rank, to the neighbouring stage; a rank takes them in order."""
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
        taken = max(begun, reader.start + reader.waiting)
        free[sender.rank, way] = taken
        yield _Frame(sender, reader, begun, taken)


def _travel(frame: _Frame, rows: _Rows) -> Iterator[Event]:
    """The frame in its row, and an arrow from the instruction that sent it to the one that took it."""
    sender, reader = frame.sender, frame.reader
    name = f"{sender.name} to stage {reader.stage}"
    place = {"ph": "X", "pid": sender.rank, "tid": rows.way(sender.op), "name": name, "cat": "frame"}
    yield {**place, **_times(frame.begun, frame.taken), "args": _bytes(sender)}
    arrow = {"name": name, "cat": "frame", "id": f"{sender.name}>{reader.stage}"}
    (_, left), (first, last) = _inside(sender), _inside(reader)
    if left <= last:  # else the clocks of the ranks are too far apart for an arrow
        yield {**arrow, "ph": "s", "pid": sender.rank, "tid": sender.stage, "ts": left}
        right = max(left, first)
        yield {**arrow, "ph": "f", "bp": "e", "pid": reader.rank, "tid": reader.stage, "ts": right}


def _inside(span: Span) -> tuple[float, float]:
    """Moments in microseconds just behind the beginning and just before the end of an instruction's event."""
    times = _times(span.start + span.waiting, span.end)
    little = min(1.0, times["dur"] / 4)
    return times["ts"] + little, times["ts"] + times["dur"] - little


def _names(spans: Sequence[Span], frames: Sequence[Event], rows: _Rows) -> list[Event]:
    """What the rows are called, in their order."""
    found = {(span.rank, span.stage): f"stage {span.stage}" for span in spans}
    ways = {rows.way(op): way for op, (_, way) in WAYS.items()}
    found |= {(event["pid"], event["tid"]): ways[event["tid"]] for event in frames if event["ph"] == "X"}
    events = []
    for rank in sorted({span.rank for span in spans}):
        place = {"ph": "M", "pid": rank, "tid": 0}
        events.append({**place, "name": "process_name", "args": {"name": f"rank {rank}"}})
        events.append({**place, "name": "process_sort_index", "args": {"sort_index": rank}})
    for (rank, row), name in sorted(found.items()):
        place = {"ph": "M", "pid": rank, "tid": row}
        events.append({**place, "name": "thread_name", "args": {"name": name}})
        events.append({**place, "name": "thread_sort_index", "args": {"sort_index": row}})
    return events
