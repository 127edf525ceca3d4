"""Which codec for which tensor: the choice that makes a simulated step shortest, as a pure function.

Source: DESIGN idea "bypass by measurement": each value and each gradient gets the codec, or none, that makes
the step shortest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import product

from ...compression.codec_cost import Cost
from ...compression.zero_value import has_bitmap
from .instruction import Instruction
from .messages import Flow, Message, StepMessages
from .simulate import step_seconds

FREE = Cost(0.0, 0.0, 0.0)
MASKED = "masked+"  # before a codec: on the words at the set bits of the value's bitmap alone
LIGHTER = 0.01  # what a second of packing weighs where it lengthens no step: the fans, the neighbours


Choice = Mapping[Flow, str]


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


def predict(messages: StepMessages, prices: Prices, choice: Choice) -> float:
    """Seconds of a step in which every flow uses the codec of ``choice``."""

    def cost(message: Message) -> Cost:
        while message.forwarded is not None:
            message = message.forwarded
        return prices.cost(message.flow, choice)

    def work(instruction: Instruction) -> float:
        seconds = prices.work.get((instruction.stage, instruction.op.value), 0.0)
        seconds += sum(cost(message).unpack_seconds for message in messages.receives.get(instruction, ()))
        packed = [m for m in messages.sends.get(instruction, ()) if m.forwarded is None]
        return seconds + sum(cost(message).pack_seconds for message in packed)

    def transfer(message: Message) -> float:
        rate = prices.rates.get(message.ranks)
        return cost(message).num_bytes / rate if rate else 0.0

    if not prices.parallel:
        return sum(work(instruction) for program in messages.programs for instruction in program)
    return step_seconds(messages, work=work, transfer=transfer)


def choose(messages: StepMessages, prices: Prices, *, start: Choice) -> dict[Flow, str]:
    """The choice whose predicted step is shortest, value by value from the largest on, from ``start``.

    A value and its gradient are chosen together, since the gradient may reuse the bitmap of the value."""

    def burden(choice: Choice) -> float:
        costs = [prices.cost(flow, choice) for flow in prices.costs]
        return predict(messages, prices, choice) + LIGHTER * sum(map(_seconds, costs))

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
