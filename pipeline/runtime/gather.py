"""Exchange between ranks: the report of a step, its spans, the flows so far.

All of it is collective: every rank calls it at the same point of its program and gets the same result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..distributed.process_group import World
from ..schedules.messages import Flow
from ..schedules.span import Span
from .auto_codec import Policy
from .report import StageReport, together


def gather_reports(
    world: World,
    loss: float,
    reports: Mapping[int, StageReport],
    *,
    ranks: Sequence[Sequence[int]],
    asked: int,
) -> dict[str, Any]:
    """Return of a Report the loss, which one rank has and the others give as 0, what every stage reports, and
    the largest number that a rank was ``asked`` to tell.

    Args:    ranks: those of every stage, of whose reports one is made."""
    mine = [float(asked), loss]
    for stage in range(len(ranks)):
        mine += reports.get(stage, StageReport()).numbers()
    rows = world.all_gather(mine, at="the report of a step")
    asks, losses, *_ = zip(*rows, strict=True)
    size = len(StageReport().numbers())
    found = [
        [StageReport.of(rows[rank][2 + size * stage : 2 + size * (stage + 1)]) for rank in own]
        for stage, own in enumerate(ranks)
    ]
    answer = {"loss": sum(losses), "stages": tuple(map(together, found)), "asked": int(max(asks))}
    if max(map(len, ranks)) == 1:
        return answer
    pairs = [zip(own, some, strict=True) for own, some in zip(ranks, found, strict=True)]
    of_ranks = {rank: one for pair in pairs for rank, one in pair}
    told = [of_ranks[rank] for rank in sorted(of_ranks)]
    busy, worked = (tuple(getattr(one, f"{name}_seconds") for one in told) for name in ("compute", "worked"))
    return answer | {"busy": busy, "worked": worked}


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
