"""Which codec for which tensor: the choice that makes a simulated step shortest, as a pure function.

Source: DESIGN idea "bypass by measurement": each value and each gradient gets the codec, or none, that makes
the step shortest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

from ...compression.choose import Cost
from ...compression.masked import has_bitmap
from .instruction import Instruction
from .messages import Itinerary, Message
from .simulate import step_seconds

FREE = Cost(0.0, 0.0, 0.0)
MASKED = "masked+"  # before a codec: on the words at the set bits of the value's bitmap alone
LIGHTER = 0.01  # what a second of packing weighs where it lengthens no step: the fans, the neighbours


class Flow(NamedTuple):
    """All frames of one value from stage to stage ("F"), or of its gradient ("B")."""

    value: str
    way: str
    source: int
    target: int

    @property
    def downstream(self) -> Flow:
        """The flow of the value whose gradient this is."""
        return Flow(self.value, "F", self.target, self.source)


Choice = Mapping[Flow, str]


def flow_of(message: Message, itinerary: Itinerary) -> Flow:
    """The flow that a message belongs to."""
    return Flow(itinerary.value(message).name, message.op.value, message.source, message.target)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What was measured: the cost of every codec on every flow, seconds of every stage's F, B and U without
    packing, bytes per second between ranks (none: no link), and whether the ranks' programs run at the same
    time."""

    costs: Mapping[Flow, Mapping[str, Cost]]
    work: Mapping[tuple[int, str], float]
    rates: Mapping[tuple[int, int], float]
    parallel: bool = True

    def cost(self, flow: Flow, choice: Choice) -> Cost:
        """What a flow costs under ``choice``; a gradient has a bitmap only if its value's codec has one."""
        codec = choice.get(flow, "raw")
        if codec.startswith(MASKED) and not has_bitmap(choice.get(flow.downstream, "raw")):
            codec = codec.removeprefix(MASKED)
        return self.costs.get(flow, {}).get(codec, FREE)


def predict(itinerary: Itinerary, prices: Prices, choice: Choice) -> float:
    """Seconds of a step in which every flow uses the codec of ``choice``."""

    def cost(message: Message) -> Cost:
        while came := itinerary.passes.get(message):
            message = came
        return prices.cost(flow_of(message, itinerary), choice)

    def work(instruction: Instruction) -> float:
        seconds = prices.work.get((instruction.stage, instruction.op.value), 0.0)
        seconds += sum(cost(message).unpack_seconds for message in itinerary.receives.get(instruction, ()))
        packed = [m for m in itinerary.sends.get(instruction, ()) if m not in itinerary.passes]
        return seconds + sum(cost(message).pack_seconds for message in packed)

    def transfer(message: Message) -> float:
        link = itinerary.rank_of[message.source], itinerary.rank_of[message.target]
        rate = prices.rates.get(link)
        return cost(message).num_bytes / rate if rate else 0.0

    if not prices.parallel:
        return sum(work(instruction) for program in itinerary.programs for instruction in program)
    return step_seconds(itinerary, work=work, transfer=transfer)


def choose(itinerary: Itinerary, prices: Prices, *, start: Choice) -> dict[Flow, str]:
    """The choice whose predicted step is shortest, value by value from the largest on, from ``start``.

    A value and its gradient are chosen together, since the gradient may reuse the bitmap of the value."""

    def burden(choice: Choice) -> float:
        costs = [prices.cost(flow, choice) for flow in prices.costs]
        return predict(itinerary, prices, choice) + LIGHTER * sum(map(_seconds, costs))

    best = {flow: start.get(flow, "raw") for flow in prices.costs}
    least = burden(best)
    for flow in sorted((f for f in prices.costs if f.way == "F"), key=lambda f: -_raw_bytes(f, prices)):
        gradient = Flow(flow.value, "B", flow.target, flow.source)
        ways = [flow, gradient] if gradient in prices.costs else [flow]
        for codecs in product(*(_worth_trying(way, prices) for way in ways)):
            other = best | dict(zip(ways, codecs, strict=True))
            if (seconds := burden(other)) < least:
                best, least = other, seconds
    return best


def _raw_bytes(flow: Flow, prices: Prices) -> float:
    return prices.costs[flow]["raw"].num_bytes


def _worth_trying(flow: Flow, prices: Prices) -> list[str]:
    """The codecs of a flow less those that another one, with a bitmap only if they need one too, beats in
    bytes and in seconds at once."""
    table = prices.costs[flow]

    def beaten(codec: str) -> bool:
        cost = table[codec]
        return any(
            other.num_bytes <= cost.num_bytes and _seconds(other) < _seconds(cost)
            for name, other in table.items()
            if codec.startswith(MASKED) or not name.startswith(MASKED)
        )

    return [codec for codec in table if not beaten(codec)]


def _seconds(cost: Cost) -> float:
    return cost.pack_seconds + cost.unpack_seconds
