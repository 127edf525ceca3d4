"""A side of ``penstock bench replicas`` on one rank: a pipeline that takes steps together with the others."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch.distributed as dist

from ...pipeline.pipeline import Pipeline
from ...pipeline.ranks.world import World
from ...pipeline.schedules.instruction import Instruction, Op
from ...pipeline.schedules.simulate import durations, simulate
from ...pipeline.schedules.span import Span
from ...stages.planner.plan import Plan


class Side:
    """A pipeline on the first ranks of all, of which this is one if it is ``here``; ``factor``: how often
    as long as it takes each forward and backward of this rank lasts."""

    def __init__(self, plan: Plan, world: World | None, make: Callable[..., Pipeline], batches: Any) -> None:
        self.plan, self.here, self.factor = plan, world is not None, 1.0
        self.batches, self.spans = cycle(batches), list[Span]()
        if world is None:
            return
        self.pipe = make(plan, world)
        run = self.pipe.engine.run
        for op in (Op.F, Op.B):
            run[op] = functools.partial(self._slowed, run[op])

    def _slowed(self, run: Callable[..., None], *what: Any) -> None:
        began = time.thread_time()  # that of other programs on this core is not multiplied
        run(*what)
        if self.factor > 1:
            time.sleep((self.factor - 1) * (time.thread_time() - began))

    def run(self, steps: int) -> float:
        """Take steps together with the other ranks of the side; return the seconds of one, by all ranks'
        clocks."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps if self.here else 0):
            self.last = self.pipe.step(*next(self.batches))
        if self.here:
            self.spans += self.pipe.timeline()
        dist.barrier()
        return (time.perf_counter() - began) / steps

    def simulated(self) -> float:
        """A step if each instruction took its usual time of the runs, and messages none."""
        known = durations(self.spans)

        def work(one: Instruction) -> float:
            return known.get((one.stage, one.op.value), 0.0)

        return simulate(self.pipe.engine.meter.step.messages, work=work, transfer=lambda _: 0.0).seconds

    def updates(self) -> float:
        """Seconds of an update and the exchange in front of it."""
        return seconds_of_updates(self.spans)


def seconds_of_updates(spans: Sequence[Span]) -> float:
    """Seconds of an update, of the stage that takes longest: the median over steps of what it takes on the
    rank that waits least for others."""
    found: dict[int, dict[int, list[float]]] = {}
    for span in spans:
        if span.op == Op.U.value:
            found.setdefault(span.stage, {}).setdefault(span.rank, []).append(span.end - span.start)
    return max(statistics.median(map(min, zip(*ranks.values(), strict=True))) for ranks in found.values())
