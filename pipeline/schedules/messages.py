"""Frames that a step passes between stages: the routes of its micro-batches along its programs.

The order of a channel is the order of the sender's program, so a receiver posts its receives ahead without
a notice. All of it is made once for a set of shapes: a step only reads its messages."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from ...compression.frame import Promise, frame_bytes
from ...stages.stage.value_routing import Route
from ...stages.tracing.dataflow import Value
from .instruction import Instruction, Op

_RAW = frozenset({"raw"})
_NOTHING = Promise((), torch.uint8, (), _RAW)


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


_NO_FLOW = Flow("", "F", 0, 0)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One frame on its way: a value of a micro-batch downstream (F), or its gradient upstream (B).

    It is one object for its sender and its receiver, and known by its identity.

    ``value`` is the number of the value in its probe, ``name`` its name. ``masked``: zeros of the value, as
    it goes down, stop its gradient, which needs the values' bitmap only. ``promise`` is what its frame will
    bring: shape, dtype, strides, codecs; ``raw_bytes`` the size of the tensor, ``frame_bytes`` of the longest
    frame. ``source`` and ``target`` are stages, ``ranks`` those that run them. ``forwarded``: the message in
    whose frame the value came, if it is sent on as it is. ``answers``: of a gradient, the message that
    brought the value down."""

    op: Op
    micro_batch: int
    value: int
    source: int
    target: int
    masked: bool = False
    name: str = ""
    promise: Promise = _NOTHING
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
    Of an endless program a step is a slice: it ``continues`` if micro-batches are in flight, ``pending_in``
    are the messages that earlier slices sent and none has received, ``pending_out`` those that this one
    leaves so."""

    programs: Sequence[Sequence[Instruction]]
    receives: Table
    sends: Table
    routes: Mapping[int, tuple[Route, ...]] = dataclasses.field(default_factory=dict)
    window: int = 2
    channels: Mapping[tuple[int, int], Sequence[Message]] = dataclasses.field(default_factory=dict)
    first: int = 0
    continues: bool = False
    pending_in: frozenset[Message] = frozenset()
    pending_out: frozenset[Message] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class MicroBatchMessages:
    """The messages of one micro-batch: for every stage what its forward receives and sends, and what its
    backward does, each in the order in which they go."""

    forward: tuple[tuple[tuple[Message, ...], tuple[Message, ...]], ...]
    backward: tuple[tuple[tuple[Message, ...], tuple[Message, ...]], ...]

    def of(self, instruction: Instruction) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
        """Messages that an instruction of this micro-batch receives, and those that it sends."""
        return (self.forward if instruction.op is Op.F else self.backward)[instruction.stage]


def micro_batch_messages(
    index: int,
    routes: Sequence[Route],
    *,
    rank_of: Callable[[int, int], int],
    codecs: frozenset[str],
    tied: bool = True,
) -> MicroBatchMessages:
    """Make the messages of micro-batch ``index``, those to the nearest stage first.

    Args:    rank_of: who runs a stage for a micro-batch.
             codecs: those that its frames may be packed with.
             tied: whether tied parameters go down with it; their gradients come back from each."""
    made: dict[tuple[int, int], Message] = {}  # by value and target
    gradients: list[Message] = []
    record = routes[0].record
    for stage, route in enumerate(routes):
        for number, target in route.sends:
            value = record.values[number]
            masked = value.requires_grad and not value.parameter and number in route.stops
            ranks = rank_of(stage, index), rank_of(target, index)
            message = made[number, target] = Message(
                Op.F, index, number, stage, target, masked, value.name, _promise(value, codecs),
                value.num_bytes, frame_bytes(value.shape, value.dtype), ranks,
                made[number, stage] if number in route.forwards else None,
                None, Flow(value.name, "F", stage, target),
            )  # fmt: skip
            if value.requires_grad:
                sure = number in routes[target].returns
                gradients.append(_gradient(message, codecs, sure=sure))
    down = [m for m in made.values() if tied or not record.values[m.value].parameter]
    inward = sorted(down, key=lambda m: m.value)
    back = sorted(gradients, key=lambda m: (-m.target, m.value))
    stages = range(len(routes))
    return MicroBatchMessages(
        forward=tuple((_to(inward, stage), _from(down, stage)) for stage in stages),
        backward=tuple((_to(gradients, stage), _from(back, stage)) for stage in stages),
    )


def _to(messages: Sequence[Message], stage: int) -> tuple[Message, ...]:
    return tuple(message for message in messages if message.target == stage)


def _from(messages: Sequence[Message], stage: int) -> tuple[Message, ...]:
    return tuple(message for message in messages if message.source == stage)


def _promise(value: Value, codecs: frozenset[str]) -> Promise:
    """Promise of the frame of a value."""
    asks = value.requires_grad
    return Promise(value.shape, value.dtype, value.strides, codecs, asks, frozen=asks)


def _gradient(down: Message, codecs: frozenset[str], *, sure: bool) -> Message:
    """Message of the gradient of the value of ``down``.

    It may have any layout that a frame keeps: autograd decides, and no probe has run it.

    Args:
        sure: True if autograd surely makes one, as the value was when traced; else None may come."""
    promise = Promise(
        down.promise.sizes, down.promise.dtype, None, codecs, True, masked=down.masked, none=not sure
    )
    return Message(
        Op.B, down.micro_batch, down.value, down.target, down.source, down.masked, down.name, promise,
        down.raw_bytes, down.frame_bytes, (down.ranks[1], down.ranks[0]), None, down,
        Flow(down.name, "B", down.target, down.source),
    )  # fmt: skip


def step_messages(
    programs: Sequence[Sequence[Instruction]],
    routes: Mapping[int, tuple[Route, ...]],
    messages: Mapping[int, MicroBatchMessages],
    *,
    window: int,
    first: int = 0,
    continues: bool = False,
    pending_in: frozenset[Message] = frozenset(),
) -> StepMessages:
    """Attach to every instruction the messages it waits for and those it sends.

    Args:    messages: those of every micro-batch.
             window: counts instructions, as ``verify`` does; several messages of one each get a receive of
             their own."""
    receives: dict[Instruction, tuple[Message, ...]] = {}
    sends: dict[Instruction, tuple[Message, ...]] = {}
    channels: dict[tuple[int, int], list[Message]] = {}
    most = 1
    for instruction in (i for program in programs for i in program):
        if instruction.micro_batch is None or instruction.op is Op.W:
            continue
        receives[instruction], sent = messages[instruction.micro_batch].of(instruction)
        sends[instruction] = sent
        most = max([most, *Counter(message.ranks[1] for message in sent).values()])
        for message in sent:
            channels.setdefault(message.ranks, []).append(message)
    received = {message for taken in receives.values() for message in taken}
    return StepMessages(
        programs=programs,
        routes=routes,
        receives=receives,
        sends=sends,
        window=window * most,
        channels={ranks: found for ranks, found in channels.items() if ranks[0] != ranks[1]},
        first=first,
        continues=continues,
        pending_in=pending_in,
        pending_out=pending_in.union(*sends.values()) - received,
    )
