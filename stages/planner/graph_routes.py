"""Where the arrows of a graph's picture run: straight beside a box or to its neighbour, else round the boxes.

Down goes the forward on the left of the boxes, up the backward on their right, from column to column both."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .graph_drawing import Arrow

ROWS = 32  # of a column; a stage with more boxes takes several, as long as each other
WIDE, HIGH, PITCH = 1.15, 0.17, 8.0  # half of a box, and from column to column
GUTTER = 3.55  # from the middle of a column to the lanes behind it
Place = tuple[float, float]
# By style: how far its lines lie beside those of the others, so that none hides another.
_APART = {"forward data": -0.05, "backward data": 0.05, "compute": 0.0}


def columns(stages: Sequence[int]) -> list[Place]:
    """The middles of boxes of these stages, in their order; each stage begins a column."""
    places, column = list[Place](), 0
    for stage in dict.fromkeys(stages):
        number = stages.count(stage)
        parts = math.ceil(number / ROWS)
        rows = math.ceil(number / parts)
        places += [((column + row // rows) * PITCH, -float(row % rows)) for row in range(number)]
        column += parts
    return places


def route(arrow: Arrow, places: Sequence[Place], centres: Sequence[Place]) -> list[Place]:
    """The corners of an arrow from its tail to its head; ``places`` of boxes, ``centres`` of circles."""
    if arrow.style == "compute":
        return _compute(places[arrow.circle], places[arrow.box])
    points = _data(centres[arrow.circle], places[arrow.box], arrow.style)
    return points if arrow.enters else points[::-1]


def _data(circle: Place, box: Place, style: str) -> list[Place]:
    """From a circle to a box."""
    (cx, cy), (x, y), apart = circle, box, _APART[style]
    if cy == y and abs(cx - x) < PITCH / 2:  # beside it
        return [(cx, cy - apart), (x + math.copysign(WIDE, cx - x), y - apart)]
    if abs(cx - x) < WIDE and abs(cy - y) < 1:  # between it and its neighbour
        return [(cx + apart, cy), (cx + apart, y + math.copysign(HIGH, cy - y))]
    if abs(cx - x) < WIDE:
        side = 1 if style == "backward data" else -1
        lane, edge = x + side * (WIDE + 0.22), x + side * WIDE
        return [(cx, cy + apart), (lane, cy + apart), (lane, y + 0.1), (edge, y + 0.1)]
    return _to_column((cx, cy + apart), (x - 0.75 + 3 * apart, y), lane=apart)


def _compute(tail: Place, head: Place) -> list[Place]:
    """From a box to a box."""
    (ax, ay), (x, y) = tail, head
    down = ay > y
    side = -1 if down else 1
    if ax == x and abs(ay - y) <= 1:
        return [(ax + side * 1.09, ay + side * HIGH), (x + side * 1.09, y - side * HIGH)]
    if ax == x:
        lane = x + side * (WIDE + 0.34)
        shift = -0.1
        return [
            (ax + side * WIDE, ay + shift),
            (lane, ay + shift),
            (lane, y + shift),
            (x + side * WIDE, y + shift),
        ]
    if ax < x:
        return _to_column((ax + 0.75, ay - HIGH), (x - 0.3, y), lane=0.24, drop=0.19)
    return _to_column((x + 1.09, y - HIGH), (ax - 0.15, ay), lane=0.36, drop=0.14)[::-1]


def _to_column(start: Place, box: Place, *, lane: float, drop: float = 0.0) -> list[Place]:
    """From ``start`` through the gutter behind its column, and over the top of a box in a later one."""
    (sx, sy), (x, y) = start, box
    gutter = round(sx / PITCH) * PITCH + GUTTER + lane
    over = y + HIGH + 0.16 + lane / 4
    return [(sx, sy), (sx, sy - drop), (gutter, sy - drop), (gutter, over), (x, over), (x, y + HIGH)]
