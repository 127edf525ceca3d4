"""Frames that a step passes between stages: the routes of its micro-batches along its programs.

The order of a channel is the order of the sender's program, so a receiver posts its receives ahead without
a notice. All of it is made once for a set of shapes: a step only reads its messages."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch

from ...compression.frame import FrameSpec, frame_bytes
from ...stages.stage.value_routing import Route
from .instruction import Flow, Instruction, Op

_NOTHING = FrameSpec((), torch.uint8, (), frozenset({"raw"}))
_NO_FLOW = Flow("", "F", 0, 0)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One frame on its way: a value of a micro-batch downstream (F), or its gradient upstream (B).

    It is one object for its sender and its receiver, and known by its identity. ``value`` is the number of
    the value in its probe. ``masked``: zeros of the value, as it goes down, stop its gradient, which needs
    the values' bitmap only. ``promise`` is what its frame will bring; ``raw_bytes`` the size of the tensor,
    ``frame_bytes`` of the longest frame. ``source`` and ``target`` are stages, ``ranks`` those that run them.
    ``forwarded``: the message in whose frame the value came, if it is sent on as it is. ``answers``: of a
    gradient, the message that brought the value down."""

    op: Op
    micro_batch: int
    value: int
    source: int
    target: int
    masked: bool = False
    name: str = ""
    promise: FrameSpec = _NOTHING
    raw_bytes: int = 0
    frame_bytes: int = 0
    ranks: tuple[int, int] = (0, 0)
    forwarded: Message | None = None
    answers: Message | None = None
    flow: Flow = _NO_FLOW

    def __str__(self) -> str:
        what = "the gradient of" if self.op is Op.B else "the value"
        return f"{what} {self.name} of micro-batch {self.micro_batch}"


Table = Mapping[Instruction, tuple[Message, ...]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepMessages:
    """All messages of a step by the instruction that receives or sends them, and what they were made from.

    ``programs`` has one list per rank; ``routes`` one entry per micro-batch that they speak of (none on
    paper), ``first`` is the first one that the step brings; ``channels`` has by (source rank, target rank)
    the messages between them in the order of sending; ``window`` receives are posted ahead on every channel.
    Of an endless program a step is a slice: it ``continues`` if micro-batches are in flight, ``pending_out``
    are the messages that this slice and earlier ones sent and none has received. ``proofs``: by message the
    last one that its sender had received from its receiver by then: that one, and all before it on its
    channel, have left."""

    programs: Sequence[Sequence[Instruction]]
    receives: Table
    sends: Table
    routes: Mapping[int, tuple[Route, ...]] = dataclasses.field(default_factory=dict)
    window: int = 2
    channels: Mapping[tuple[int, int], Sequence[Message]] = dataclasses.field(default_factory=dict)
    first: int = 0
    continues: bool = False
    pending_out: frozenset[Message] = frozenset()
    proofs: Mapping[Message, Message] = dataclasses.field(default_factory=dict)


Both = tuple[tuple[Message, ...], tuple[Message, ...]]
MicroBatchMessages = tuple[list[Both], list[Both]]
"""For every stage what its forward receives and sends, and what its backward does, in order."""


def micro_batch_messages(
    index: int,
    routes: Sequence[Route],
    *,
    rank_of: Callable[[int, int], int],
    codecs: frozenset[str],
    tied: bool = True,
) -> MicroBatchMessages:
    """Make the messages of micro-batch ``index``, those to the nearest stage first; ``tied``: tied parameters
    go down with it. Their gradients come back from each."""
    made: dict[tuple[int, int], Message] = {}  # by value and target
    gradients: list[Message] = []
    record = routes[0].record
    for stage, route in enumerate(routes):
        for number, target in route.sends:
            value = record.values[number]
            masked = value.requires_grad and not value.parameter and number in route.stops
            ranks, asks = (rank_of(stage, index), rank_of(target, index)), value.requires_grad
            promise = FrameSpec(value.shape, value.dtype, value.strides, codecs, asks, frozen=asks)
            message = made[number, target] = Message(
                Op.F, index, number, stage, target, masked, value.name, promise,
                value.num_bytes, frame_bytes(value.shape, value.dtype), ranks,
                made[number, stage] if number in route.forwards else None,
                None, Flow(value.name, "F", stage, target),
            )  # fmt: skip
            if not asks:
                continue
            # In any layout that a frame keeps: autograd decides. None may come unless the trace had one.
            none = number not in routes[target].returns
            promise = FrameSpec(value.shape, value.dtype, None, codecs, True, masked=masked, none=none)
            gradients.append(
                Message(
                    Op.B, index, number, target, stage, masked, value.name, promise,
                    message.raw_bytes, message.frame_bytes, (ranks[1], ranks[0]),
                    None, message, Flow(value.name, "B", target, stage),
                )
            )  # fmt: skip
    down = [m for m in made.values() if tied or not record.values[m.value].parameter]
    inward = sorted(down, key=lambda m: m.value)
    back = sorted(gradients, key=lambda m: (-m.target, m.value))

    def at(stage: int, came: Sequence[Message], went: Sequence[Message]) -> Both:
        return tuple(m for m in came if m.target == stage), tuple(m for m in went if m.source == stage)

    stages = range(len(routes))
    return [at(stage, inward, down) for stage in stages], [at(stage, gradients, back) for stage in stages]


def step_messages(
    programs: Sequence[Sequence[Instruction]], routes: Mapping[int, tuple[Route, ...]],
    messages: Mapping[int, MicroBatchMessages], *, window: int, first: int = 0, continues: bool = False,
    pending_in: frozenset[Message] = frozenset(),
) -> StepMessages:  # fmt: skip
    """Attach to every instruction the messages it waits for and those it sends; ``window`` counts
    instructions, as ``verify`` does: several messages of one each get a receive."""
    receives: dict[Instruction, tuple[Message, ...]] = {}
    sends: dict[Instruction, tuple[Message, ...]] = {}
    channels: dict[tuple[int, int], list[Message]] = {}
    last: dict[tuple[int, int], Message] = {}  # received on a channel so far
    proofs: dict[Message, Message] = {}
    most = 1
    for instruction in (i for program in programs for i in program):
        if instruction.micro_batch is None or instruction.op is Op.W:
            continue
        forward, backward = messages[instruction.micro_batch]
        received, sent = (forward if instruction.op is Op.F else backward)[instruction.stage]
        receives[instruction], sends[instruction] = received, sent
        most = max([most, *Counter(message.ranks[1] for message in sent).values()])
        last |= {message.ranks: message for message in received}
        for message in sent:
            channels.setdefault(message.ranks, []).append(message)
            if (before := last.get((message.ranks[1], message.ranks[0]))) is not None:
                proofs[message] = before
    arrived = {message for taken in receives.values() for message in taken}
    return StepMessages(
        programs=programs, routes=routes, receives=receives, sends=sends, window=window * most, first=first,
        channels={ranks: found for ranks, found in channels.items() if ranks[0] != ranks[1]},
        continues=continues, proofs=proofs, pending_out=pending_in.union(*sends.values()) - arrived,
    )  # fmt: skip
