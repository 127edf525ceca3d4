"""What the ranks tell each other of their work: the report of a step, its spans, the flows so far.

All of it is collective: every rank asks at the same point of its program, and every rank gets the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..ranks.world import World
from ..schedules.messages import Flow
from ..schedules.span import Span
from .policy import Policy
from .report import StageReport


def gather_reports(
    world: World, loss: float, reports: Mapping[int, StageReport], *, num_stages: int, asked: int
) -> dict[str, Any]:
    """Return of a Report the loss, which one rank has and the others give as 0, what every stage reports, and
    the largest number that a rank was ``asked`` to tell."""
    mine = [float(asked), loss]
    for stage in range(num_stages):
        mine += reports.get(stage, StageReport()).numbers()
    told, *columns = zip(*world.all_gather(mine, at="the report of a step"), strict=True)
    total, *numbers = map(sum, columns)
    size = len(numbers) // num_stages
    rows = [numbers[i : i + size] for i in range(0, len(numbers), size)]
    return {"loss": total, "stages": tuple(map(StageReport.of, rows)), "asked": int(max(told))}


def gather_spans(world: World, spans: Sequence[Span]) -> list[Span]:
    """Return the spans of all ranks."""
    return [Span(*fields) for row in world.all_gather_json(list(spans), at="the timeline") for fields in row]


def gather_flows(world: World, totals: Mapping[Flow, Sequence[int]], policy: Policy) -> list[dict[str, Any]]:
    """Return the flows that all ranks send, with their bytes raw and sent, and the codec of each now."""
    rows = world.all_gather_json([[*flow, *total] for flow, total in totals.items()], at="the flows")
    names = (*Flow._fields, "bytes_raw", "bytes_sent")
    found = [dict(zip(names, fields, strict=True)) for row in rows for fields in row]
    codecs = [policy.codec(Flow(*(flow[name] for name in Flow._fields))) for flow in found]
    return [flow | {"codec": codec} for flow, codec in zip(found, codecs, strict=True)]
