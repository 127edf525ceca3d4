"""The endless program of asynchronous training, by one clock for all stages: no flush between batches.

Micro-batches are numbered from the last drain on, over all batches. F of micro-batch m on stage s of S
happens at time 2m + s, B at 2m + 2S - 1 - s, so that a stage's own order is that of 1F1B.

Source: Narayanan et al., PipeDream, SOSP 2019, section 3.2; PipeDream-2BW, ICML 2021, section 3.1."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from .async_1f1b import stream, time_of, with_updates
from .instruction import Instruction, Op


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """Which micro-batches there are since the last drain: ``ends`` has their number behind each batch, but
    for those that all stages have left behind.

    ``each``: every micro-batch is an update of its own; else every batch is one, when all stages are done
    with it."""

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
    """What a rank with these stages does from time ``start`` on and before ``stop``; None: to the end."""
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
