"""How long the ranks of a step stand still: measured, and on paper with the durations that were measured.

Where the two differ, the engine, the link or a busy machine loses time that the schedule itself would not."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from ...pipeline.schedules.instruction import Instruction
from ...pipeline.schedules.messages import Itinerary, Message
from ...pipeline.schedules.simulate import simulate
from ...pipeline.schedules.span import Span

Durations = Mapping[tuple[int, str], float]


def durations(steps: Sequence[Sequence[Span]]) -> dict[tuple[int, str], float]:
    """Median seconds of every stage's F, B and so on, packing included, waiting left out."""
    found: dict[tuple[int, str], list[float]] = {}
    for span in (span for step in steps for span in step):
        found.setdefault((span.stage, span.op), []).append(span.computing)
    return {key: statistics.median(seconds) for key, seconds in found.items()}


def simulated(itinerary: Itinerary, seconds: Durations, *, rate: float | None, stream: bool) -> list[float]:
    """The share of a step in which each rank would wait, if every instruction took its usual time.

    Args: rate: bits per second between ranks, None: no time at all.
          stream: the step has no end of its own: a rank waits only for the one that has the most to do.
    """

    def work(instruction: Instruction) -> float:
        return seconds.get((instruction.stage, instruction.op.value), 0.0)

    def transfer(message: Message) -> float:
        return 8 * itinerary.value(message).num_bytes / rate if rate else 0.0

    if not stream:
        return list(simulate(itinerary, work=work, transfer=transfer).bubble)
    busy = [sum(map(work, program)) for program in itinerary.programs]
    return [1 - of_rank / max(busy) for of_rank in busy]
