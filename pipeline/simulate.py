"""How long a step would take: its programs run on paper, with seconds for each instruction and each frame.

The same instruction lists that run are simulated, so overlap, waiting and micro-batches in flight are not
estimated by a formula: they come out."""

from __future__ import annotations

from collections.abc import Callable

from .instruction import Instruction
from .messages import Itinerary, Message


def simulate(
    itinerary: Itinerary,
    *,
    work: Callable[[Instruction], float],
    transfer: Callable[[Message], float],
) -> float:
    """Seconds from the first instruction to the last.

    Args:    work: seconds of an instruction on its rank, packing and unpacking included.
             transfer: seconds that a message occupies its link; a link carries one message at a time in each
             direction, in the order of sending. Between stages of one rank there is no link.
    """
    arrived: dict[Message, float] = {}
    link_free: dict[tuple[int, int], float] = {}
    clock = [0.0] * len(itinerary.programs)
    place = [0] * len(itinerary.programs)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(itinerary.programs):
            while place[rank] < len(program):
                instruction = program[place[rank]]
                needed = itinerary.receives.get(instruction, ())
                if any(message not in arrived for message in needed):
                    break
                start = max(clock[rank], *(arrived[message] for message in needed), 0.0)
                clock[rank] = start + work(instruction)
                for message in itinerary.sends.get(instruction, ()):
                    arrived[message] = _pass(message, itinerary, clock[rank], link_free, transfer)
                place[rank] += 1
                moved = True
    return max(clock)


def _pass(
    message: Message,
    itinerary: Itinerary,
    ready: float,
    link_free: dict[tuple[int, int], float],
    transfer: Callable[[Message], float],
) -> float:
    """When a message that is packed at ``ready`` has arrived."""
    link = itinerary.rank_of[message.source], itinerary.rank_of[message.target]
    if link[0] == link[1]:
        return ready
    link_free[link] = max(ready, link_free.get(link, 0.0)) + transfer(message)
    return link_free[link]
