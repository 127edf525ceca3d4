"""Asynchronous 1F1B: every micro-batch is an update of its own, and nothing is ever flushed.

Once the pipeline is full no rank waits; the price is that a gradient meets weights that have moved on, unless
their versions are kept (stages/weight_versions/policies.py). The order is that of a clock, so it goes on over
ends of batches.

Source: Narayanan et al., PipeDream, SOSP 2019, section 3.2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from .building_blocks import check, check_no_extra
from .instruction import Instruction, Op


def async_1f1b(
    stages_of_rank: Sequence[Sequence[int]], num_micro_batches: int, *, extra_in_flight: int = 0
) -> list[list[Instruction]]:
    """One program per rank, from an empty pipeline to an empty one, with an update after each backward.

    Raises:  ScheduleError: fewer than one micro-batch, an extra, or stages that are no neighbours.
    """
    # rank 0   F0 .. F1 B0 F2 B1 .. B2          half ticks: F of m at 2m + stage
    # rank 1   .. F0 B0 F1 B1 F2 B2 ..                      B of m at 2m + 2 stages - 1 - stage
    check(stages_of_rank, num_micro_batches, extra_in_flight)
    check_no_extra("async_1f1b", extra_in_flight)
    num_stages = sum(map(len, stages_of_rank))
    return [
        with_updates(stream(stages, num_stages=num_stages, fed=num_micro_batches))
        for stages in stages_of_rank
    ]


def time_of(instruction: Instruction, num_stages: int) -> int:
    """The half tick of an F or a B, with micro-batches numbered since the pipeline was empty."""
    assert instruction.micro_batch is not None, "an update has no time of its own"
    return 2 * instruction.micro_batch + _offset(instruction.stage, instruction.op, num_stages)


def stream(
    stages: Iterable[int], *, num_stages: int, fed: int, start: int = 0, stop: int | None = None
) -> list[Instruction]:
    """F and B of these stages with the first ``fed`` micro-batches, by time, from ``start`` up to ``stop``.

    Slices that meet make the whole; ``stop=None`` is the drain. At equal times B comes before F. The work is
    that of the slice, however long the stream has been.
    """
    end = 2 * (fed + num_stages) if stop is None else stop
    found = [
        Instruction(stage, op, index)
        for stage in stages
        for op in (Op.B, Op.F)
        for offset in [_offset(stage, op, num_stages)]
        for index in range(max(0, _half(start - offset)), min(fed, _half(end - offset)))
    ]
    return sorted(found, key=lambda each: (time_of(each, num_stages), each.op is Op.F, each.stage))


def with_updates(program: Iterable[Instruction]) -> list[Instruction]:
    """Follow each B by the update of its stage: ``0B0 0U``."""
    return [
        step
        for each in program
        for step in ([each, Instruction(each.stage, Op.U)] if each.op is Op.B else [each])
    ]


def _offset(stage: int, op: Op, num_stages: int) -> int:
    return stage if op is Op.F else 2 * num_stages - 1 - stage


def _half(ticks: int) -> int:
    """The first micro-batch that is not before: half, rounded up."""
    return -(-ticks // 2)


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
    """Instructions of a rank with these stages from time ``start`` on and before ``stop``; None: to the
    end.
    """
    # 3 stages, 3 micro-batches, an update each:
    #   time      0  1  2  3  4  5   6  7   8  9   10
    #   stage 0   F0    F1    F2 B0U    B1U    B2U
    #   stage 1      F0    F1 B0U F2 B1U   B2U
    #   stage 2         F0 B0U F1 B1U F2 B2U
    own = sorted(stages)
    program = stream(own, num_stages=fed.num_stages, fed=fed.number, start=start, stop=stop)
    if fed.each:
        return with_updates(program)
    # At one time the updates come first.
    due = [time for time in map(fed.due, fed.ends) if start <= time and (stop is None or time < stop)]
    timed = [(time, Instruction(stage, Op.U)) for time in due for stage in own]
    timed += [(time_of(instruction, fed.num_stages), instruction) for instruction in program]
    return [instruction for _, instruction in sorted(timed, key=lambda item: item[0])]
