"""Asynchronous 1F1B: every micro-batch is an update of its own, and nothing is ever flushed.

Once the pipeline is full no rank waits; the price is that a gradient meets weights that have moved on, unless
their versions are kept (stages/weight_versions/policies.py).
Source: Narayanan et al., PipeDream, SOSP 2019, section 3.2."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from .building_blocks import check
from .instruction import Instruction, Op


def async_1f1b(
    stages_of_rank: Sequence[Sequence[int]], num_micro_batches: int, *, extra_in_flight: int = 0
) -> list[list[Instruction]]:
    """One program per rank, from an empty pipeline to an empty one, with an update after each backward."""
    # rank 0   F0 .. F1 B0 F2 B1 .. B2          half ticks: F of m at 2m + stage
    # rank 1   .. F0 B0 F1 B1 F2 B2 ..                      B of m at 2m + 2 stages - 1 - stage
    check(stages_of_rank, num_micro_batches, extra_in_flight, fixed="async_1f1b")
    fed = StreamState(num_stages=sum(map(len, stages_of_rank)), each=True, ends=(num_micro_batches,))
    return [between(stages, fed) for stages in stages_of_rank]


def _timed(
    stages: Iterable[int], num_stages: int, fed: int, start: int, stop: int | None
) -> list[tuple[int, Instruction]]:
    """F and B of these stages with the first ``fed`` micro-batches, and the half ticks at which they begin,
    from ``start`` up to ``stop`` (None: the drain); B first at equal times. The work is that of the slice."""
    end = 2 * (fed + num_stages) if stop is None else stop
    found = [
        (2 * index + offset, Instruction(stage, op, index))
        for stage in stages
        for op, offset in ((Op.B, 2 * num_stages - 1 - stage), (Op.F, stage))
        for index in range(max(0, -((offset - start) // 2)), min(fed, -((offset - end) // 2)))
    ]
    return sorted(found, key=lambda item: (item[0], item[1].op is Op.F, item[1].stage))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """Micro-batches since the last drain: ``ends`` has their number after each batch, except for those
    that all stages have completed.

    ``each``: every micro-batch is an update; else every batch is one, when all stages are done with it."""

    num_stages: int
    each: bool
    ends: tuple[int, ...] = ()

    @property
    def number(self) -> int:
        """Micro-batches so far; the next would begin at twice this time, where a step ends."""
        return self.ends[-1] if self.ends else 0

    def due(self, end: int) -> int:
        """When all stages are done with the batch that ends there: when the first stage is."""
        return 2 * end + 2 * self.num_stages - 2

    def followed(self, number: int, *, clock: int) -> StreamState:
        """With a batch of ``number`` micro-batches more, at the time ``clock``."""
        open_ends = [end for end in self.ends if self.due(end) >= clock]
        return dataclasses.replace(self, ends=(*open_ends, self.number + number))


def between(
    stages: Iterable[int], fed: StreamState, *, start: int = 0, stop: int | None = None
) -> list[Instruction]:
    """Instructions of a rank with these stages from time ``start`` on and before ``stop``."""
    # 3 stages, 3 micro-batches, an update each:
    #   time      0  1  2  3  4  5   6  7   8  9   10
    #   stage 0   F0    F1    F2 B0U    B1U    B2U
    #   stage 1      F0    F1 B0U F2 B1U   B2U
    #   stage 2         F0 B0U F1 B1U F2 B2U
    own = sorted(stages)
    timed = _timed(own, fed.num_stages, fed.number, start, stop)
    if fed.each:
        pairs = ((i, Instruction(i.stage, Op.U)) if i.op is Op.B else (i,) for _, i in timed)
        return [instruction for pair in pairs for instruction in pair]
    # At one time the updates come first.
    due = [time for time in map(fed.due, fed.ends) if start <= time and (stop is None or time < stop)]
    updates = [(time, Instruction(stage, Op.U)) for time in due for stage in own]
    return [instruction for _, instruction in sorted([*updates, *timed], key=lambda item: item[0])]
