"""Which frames a step passes between stages: the routes of its micro-batches along its programs.

The order of a channel is the order of the sender's program, so a receiver posts its receives ahead without
being told."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

from ...compression.promise import Promise
from ...stages.stage.route import Route
from ...stages.tracing.probe import Probe, Value
from .instruction import Instruction, Op

_RAW = frozenset({"raw"})


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One frame on its way: a value of a micro-batch downstream (F), or its gradient upstream (B).

    ``masked``: zeros of the value, as it goes down, stop its gradient, which needs the values' bitmap only.
    """

    op: Op
    micro_batch: int
    value: int
    source: int
    target: int
    masked: bool = False

    @property
    def upstream(self) -> Message:
        """The message that brings up the gradient of the value that this one brings down."""
        return Message(Op.B, self.micro_batch, self.value, self.target, self.source, self.masked)

    @property
    def downstream(self) -> Message:
        """The message that brought down the value whose gradient this one brings up."""
        return Message(Op.F, self.micro_batch, self.value, self.target, self.source, self.masked)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Itinerary:
    """All messages of a step by the instruction that receives or sends them, and what they came from.

    ``programs`` has one list per rank; ``records`` and ``routes`` one entry per micro-batch that they speak
    of, ``first`` is the first one that the step brings; ``passes`` says in which message a value came that is
    sent on as it is; ``window`` receives are posted ahead on every channel. Of an endless program a step is a
    slice: it ``goes_on`` if micro-batches are in flight, ``came`` holds the messages that earlier slices sent
    and none has received, ``open`` those that this one leaves so."""

    programs: tuple[tuple[Instruction, ...], ...]
    rank_of: tuple[int, ...]
    records: Mapping[int, Probe]
    routes: Mapping[int, tuple[Route, ...]]
    receives: Mapping[Instruction, tuple[Message, ...]]
    sends: Mapping[Instruction, tuple[Message, ...]]
    passes: Mapping[Message, Message]
    window: int
    first: int = 0
    goes_on: bool = False
    came: frozenset[Message] = frozenset()
    open: frozenset[Message] = frozenset()

    def value(self, message: Message) -> Value:
        """What is known of the value that a message carries."""
        return self.records[message.micro_batch].values[message.value]

    def promise(self, message: Message, codecs: frozenset[str], *, none: bool) -> Promise:
        """What the frame of a message will bring, packed with one of ``codecs``; ``none``: or nothing.

        A gradient may lie in any way that a frame keeps: autograd decides, and no probe has run it."""
        value = self.records[message.micro_batch].values[message.value]
        if value.number is not None:
            return Promise((), value.dtype, (), _RAW, number=True)
        if message.op is Op.F:
            asks = value.requires_grad
            return Promise(value.shape, value.dtype, value.strides, codecs, asks, frozen=asks)
        return Promise(value.shape, value.dtype, None, codecs, value.requires_grad, message.masked, none)

    def brings_one(self, message: Message) -> bool:
        """Whether autograd surely makes the gradient ``message``, as the value was when it was traced."""
        return message.value in self.routes[message.micro_batch][message.source].returns

    def channels(self, rank: int) -> dict[int, list[Message]]:
        """For every other rank the messages it sends to ``rank``, in the order in which it sends them."""
        ordered: dict[int, list[Message]] = {}
        for source, program in enumerate(self.programs):
            for instruction in program if source != rank else ():
                for message in self.sends.get(instruction, ()):
                    if self.rank_of[message.target] == rank:
                        ordered.setdefault(source, []).append(message)
        return ordered


def itinerary(
    programs: Sequence[Sequence[Instruction]],
    records: Mapping[int, Probe],
    routes: Mapping[int, tuple[Route, ...]],
    *,
    rank_of: Sequence[int],
    window: int,
    stream: bool = False,
    first: int = 0,
    goes_on: bool = False,
    came: frozenset[Message] = frozenset(),
) -> Itinerary:
    """Attach to every instruction the messages it waits for and those it sends, nearest stage first.

    Args:    window: counts instructions, as ``verify`` does; several messages of one each get a receive of
             their own.
             stream: the programs are a slice of an endless one, in which every micro-batch may see other
             weights; so a tied parameter goes down with each, else once a step, with micro-batch 0."""
    receives: dict[Instruction, tuple[Message, ...]] = {}
    sends: dict[Instruction, tuple[Message, ...]] = {}
    passes: dict[Message, Message] = {}
    for instruction in (i for program in programs for i in program):
        stage, op, index = instruction.stage, instruction.op, instruction.micro_batch
        if index is None or op is Op.W:
            continue
        values, route = records[index].values, routes[index][stage]
        down = [
            Message(Op.F, index, n, source, stage, _masked(values[n], n, routes[index][source]))
            for n, source in route.receives
        ]
        further = [
            Message(Op.F, index, n, stage, target, _masked(values[n], n, route)) for n, target in route.sends
        ]
        if op is Op.F:
            again = index > 0 and not stream
            receives[instruction] = tuple(m for m in down if not (again and values[m.value].parameter))
            sends[instruction] = tuple(m for m in further if not (again and values[m.value].parameter))
            arrived = {message.value: message for message in down}
            passes |= {m: arrived[m.value] for m in further if m.value in route.passes}
        else:
            receives[instruction] = tuple(m.upstream for m in further if values[m.value].requires_grad)
            back = [m.upstream for m in down if values[m.value].requires_grad]
            sends[instruction] = tuple(sorted(back, key=lambda message: (-message.target, message.value)))
    counts = [Counter(rank_of[message.target] for message in sent) for sent in sends.values()]
    most = max((number for count in counts for number in count.values()), default=1)
    sent = frozenset(message for messages in sends.values() for message in messages)
    received = frozenset(message for messages in receives.values() for message in messages)
    return Itinerary(
        programs=tuple(tuple(program) for program in programs),
        rank_of=tuple(rank_of),
        records=records,
        routes=routes,
        receives=receives,
        sends=sends,
        passes=passes,
        window=window * most,
        first=first,
        goes_on=goes_on,
        came=came,
        open=(came | sent) - received,
    )


def _masked(value: Value, number: int, source: Route) -> bool:
    return value.requires_grad and not value.parameter and number in source.stops
