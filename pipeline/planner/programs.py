"""The programs of a plan, or of a schedule before there is one, and what waits on every stage as they run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ...compression.errors import ScheduleError
from ...stages.planner.plan import Plan
from ...stages.weights.policies import STREAM
from ..schedules.endless import StreamState, between
from ..schedules.live import Programs, live_micro_batches, live_versions
from ..schedules.replicated import schedule_of

MOST_EXTRA = 2  # micro-batches: more hide nothing that these do not
Layout = Sequence[Sequence[int]]  # the stages of each rank


def step_programs(plan: Plan) -> Programs:
    """The programs of one step; raises ScheduleError where the schedule does not suit the plan."""
    schedule = schedule_of(plan)
    return schedule(plan.stages_of_rank, plan.micro_batches, extra_in_flight=plan.extra_in_flight)


def endless_programs(
    layout: Layout, schedule: str, micro_batches: int, *, more: int = 2, extra_in_flight: int = 0
) -> Programs:
    """The programs of a stream from an empty pipeline to an empty one: ``more`` batches than fill it. What is
    in flight decides who reads which weights, so that nothing ``extra`` is."""
    num_stages = sum(map(len, layout))
    ends = [micro_batches * (i + 1) for i in range(filling(num_stages, micro_batches) + more)]
    fed = StreamState(num_stages=num_stages, each=schedule == STREAM, ends=tuple(ends))
    return [between(own, fed) for own in layout]


def most_extra(make: Callable[..., Programs], fits: Callable[[Programs], bool]) -> int:
    """How many micro-batches beyond its own a schedule may have in flight: as many as it takes, as ``fits``
    allows, and as change something, at most ``MOST_EXTRA``; ``make(extra_in_flight=)``: its programs."""
    before = make(extra_in_flight=0)
    for extra in range(1, MOST_EXTRA + 1):
        try:
            programs = make(extra_in_flight=extra)
        except ScheduleError:  # its order is fixed
            return extra - 1
        if programs == before or not fits(programs):
            return extra - 1
        before = programs
    return MOST_EXTRA


def predicted_bytes(plan: Plan, live: Sequence[int]) -> list[int]:
    """Bytes of every stage when ``live`` micro-batches were in flight, of which ``plan`` counts those that it
    begins with; what more of them saved is taken to be there as it is."""
    more = [0] * plan.num_stages
    if plan.most_extra_in_flight > plan.extra_in_flight:
        counted = live_micro_batches(step_programs(plan))
        more = [max(0, flew - known) for flew, known in zip(live, counted, strict=True)]
    return [stage.memory_bytes + n * stage.saved_bytes for n, stage in zip(more, plan.stages, strict=True)]


def filling(num_stages: int, micro_batches: int) -> int:
    """Batches that fill a pipeline."""
    return math.ceil(2 * num_stages / micro_batches)


def waiting(programs: Programs, *, weights: str, micro_batches: int) -> list[tuple[int, int]]:
    """For every stage the most micro-batches in flight, and the most old versions of its weights."""
    versions = live_versions(programs, weights=weights, micro_batches=micro_batches)
    pairs = zip(live_micro_batches(programs), versions, strict=True)
    return [(in_flight, kept - 1) for in_flight, kept in pairs]
