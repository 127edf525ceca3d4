"""The programs of a plan, or of a schedule before there is one, and what waits on every stage as they run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...stages.planner.plan import Plan
from ...stages.weights.policies import STREAM
from ..schedules import schedule_named
from ..schedules.endless import StreamState, between
from ..schedules.live import Programs, live_micro_batches, live_versions

Layout = Sequence[Sequence[int]]  # the stages of each rank


def step_programs(plan: Plan) -> Programs:
    """The programs of one step; raises ScheduleError where the schedule does not suit the plan."""
    schedule = schedule_named(plan.schedule, plan.program)
    return schedule(plan.stages_of_rank, plan.micro_batches, extra_in_flight=plan.extra_in_flight)


def endless_programs(layout: Layout, *, schedule: str, micro_batches: int, more: int) -> Programs:
    """The programs of a stream from an empty pipeline to an empty one: ``more`` batches than fill it."""
    num_stages = sum(map(len, layout))
    ends = [micro_batches * (i + 1) for i in range(filling(num_stages, micro_batches) + more)]
    fed = StreamState(num_stages=num_stages, each=schedule == STREAM, ends=tuple(ends))
    return [between(own, fed) for own in layout]


def filling(num_stages: int, micro_batches: int) -> int:
    """Batches that fill a pipeline."""
    return math.ceil(2 * num_stages / micro_batches)


def waiting(programs: Programs, *, weights: str, micro_batches: int) -> list[tuple[int, int]]:
    """For every stage the most micro-batches in flight, and the most old versions of its weights."""
    versions = live_versions(programs, weights=weights, micro_batches=micro_batches)
    pairs = zip(live_micro_batches(programs), versions, strict=True)
    return [(in_flight, kept - 1) for in_flight, kept in pairs]
