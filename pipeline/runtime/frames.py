"""Frames of this process's stages: a tensor is packed once, and its frame kept while anybody needs it again.

The frame that goes downstream, the one that the next user of the value gets, and the one whose bitmap the
gradient reuses on its way back are the same bytes in the same storage.
Source: claims A7-A10 of CN115016937A (one module packs on every path out of a stage, and unpacks once)."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch

from ...compression.codec import buffer_bytes, decode_received, pack_into
from ...compression.errors import CodecError, StageError
from ...compression.frame import asks_gradient
from ...compression.geometry import geometry
from ...compression.pool import Frame
from ...stages.tracing.probe import NUMBERS, Value
from ..ranks.transport import Transport
from ..schedules.instruction import Instruction, Op
from ..schedules.messages import Itinerary, Message
from ..schedules.prices import MASKED, Flow, flow_of
from .policy import Policy


class Frames:
    """Packs what leaves a stage and unpacks what arrives.

    ``went`` has by number what an instruction packed and sent downstream, with its frame, if that is to be
    ``noted`` for a store of saved tensors; ``waited`` and ``packing`` count the seconds without a
    frame and those of packing and unpacking, ``bytes_raw`` and ``bytes_sent`` what was sent in ``codecs``,
    all for one instruction; ``totals`` the bytes of every flow in training, unpacked and
    packed."""

    def __init__(self, transport: Transport, *, policy: Policy, noted: bool) -> None:
        self.transport, self.policy, self.noted = transport, policy, noted
        self.kept: dict[tuple[int, Message], Frame] = {}
        self.went: dict[int, tuple[torch.Tensor, Frame]] = {}
        self.frozen: set[tuple[int, Message]] = set()
        self.start()
        self.totals: dict[Flow, tuple[int, int]] = {}

    def begin(self, itinerary: Itinerary, *, training: bool) -> None:
        """Get ready for a step whose messages are these; let go of what a failed step kept."""
        self.itinerary, self.training = itinerary, training
        self.flows: dict[Message, Flow] = {}
        self.policy.begin(itinerary, training=training)
        if not itinerary.goes_on:
            for frame in self.kept.values():
                frame.release()
            self.kept.clear()
            self.frozen.clear()
        self.transport.begin(itinerary)

    def end(self) -> None:
        """End the step: wait for what was sent, let go of what the last instruction noted."""
        self.start()
        self.transport.end()

    def start(self) -> None:
        """Begin to count, and to note what is packed, for the next instruction."""
        self.waited = self.packing = 0.0
        self.bytes_raw = self.bytes_sent = 0
        self.codecs: dict[str, None] = {}
        for _, frame in self.went.values():
            frame.release()
        self.went.clear()

    def came(self, instruction: Instruction) -> dict[int, Frame]:
        """The frames of the values that an instruction received, by number."""
        return {m.value: self.kept[m.target, m] for m in self.itinerary.receives[instruction]}

    def receive(self, message: Message) -> Any:
        """Wait for a frame and unpack it; a value's frame is kept as it came until ``let_go``."""
        began = time.perf_counter()
        frame = self.transport.receive(message)
        came = time.perf_counter()
        mask = self._mask(message, message.target)
        promise = self.itinerary.promise(
            message, self.policy.codecs, none=self._may_be_none(message, message.target)
        )
        try:
            item, frame.num_bytes = decode_received(frame.buffer, promise, mask=mask)
        except CodecError as error:
            raise CodecError(f"{_name(message, self.itinerary)}: {error}") from error
        if item is not None and message.op is Op.F and self.policy.sees(message):
            self.policy.arriving(message, item)
        self.waited += came - began
        self.packing += time.perf_counter() - came
        if message.op is Op.F:
            self.kept[message.target, message] = frame
        else:
            frame.release()
        value = self.itinerary.value(message)
        if item is None:
            return None
        if value.number is not None:
            return item.item()
        if value.requires_grad and message.op is Op.F:
            item.requires_grad_(asks_gradient(frame.buffer))
            self._ask(message, message.target, item)
        return item

    def send(self, message: Message, item: Any) -> tuple[int, int]:
        """Send a value or gradient, in the frame in which it came if it did; returns bytes raw and packed."""
        value = self.itinerary.value(message)
        came = self.itinerary.passes.get(message)
        if came is None:
            frame = self._pack(message, value, item)
        else:
            frame = self.kept[message.source, came].hold()
        if message.op is Op.F and message.masked:
            self.kept[message.source, message] = frame.hold()
        if message.op is Op.F and came is None:
            self._note(message, item, frame)
        if message.op is Op.F and value.requires_grad:
            self._ask(message, message.source, item)
        raw, sent = 0 if item is None else value.num_bytes, frame.num_bytes
        if self.training:
            flow = self._flow(message)
            before = self.totals.get(flow, (0, 0))
            self.totals[flow] = before[0] + raw, before[1] + sent
        self.bytes_raw, self.bytes_sent = self.bytes_raw + raw, self.bytes_sent + sent
        self.codecs[self.policy.codec(self._flow(message))] = None
        self.transport.send(message, frame)
        return raw, sent

    def let_go(self, stage: int, values: Iterable[Message]) -> None:
        """Release what ``stage`` kept of these values, sent or received."""
        for message in values:
            if frame := self.kept.pop((stage, message), None):
                frame.release()

    def _flow(self, message: Message) -> Flow:
        if message not in self.flows:
            self.flows[message] = flow_of(message, self.itinerary)
        return self.flows[message]

    def _note(self, message: Message, item: Any, frame: Frame) -> None:
        """Note the frame of a value, so that who saved it need not pack it again."""
        if not self.noted or not isinstance(item, torch.Tensor) or item.is_conj() or item.is_neg():
            return  # a frame holds what a lazy conjugate means, its memory what it was made from
        self.went[message.value] = item, frame.hold()

    def _pack(self, message: Message, value: Value, item: Any) -> Frame:
        if value.number is not None:
            item = torch.tensor(item, dtype=NUMBERS[type(item)])  # as it is now, not as it was when traced
        elif item is not None:
            _check_tensor(message, value, item)
        elif not self._may_be_none(message, message.source):
            raise StageError(
                f"a gradient comes back to {value.name}, as it was traced, found None; a loss that has "
                "nothing to learn from a micro-batch reads its outputs all the same: outputs.sum() * 0"
            )
        began = time.perf_counter()
        if item is not None and self.policy.sees(message):
            self.policy.leaving(message, item)
        named = "raw" if value.number else self.policy.codec(self._flow(message))
        codec, pool = named.removeprefix(MASKED), self.transport.pool
        mask = None if codec == named else self._mask(message, message.source)
        buffer = pool.take(buffer_bytes(value.shape, value.dtype, codec))
        asks = value.requires_grad and (item is None or message.op is Op.B or item.requires_grad)
        num_bytes = pack_into(item, buffer, codec=codec, requires_grad=asks, mask=mask)
        self.packing += time.perf_counter() - began
        return Frame(buffer, num_bytes, pool)

    def _ask(self, message: Message, stage: int, item: torch.Tensor) -> None:
        """Remember, at either end, a value that was frozen since the trace and asks for no gradient now."""
        if not item.requires_grad:
            self.frozen.add((stage, message))

    def _may_be_none(self, message: Message, stage: int) -> bool:
        """Whether a message may bring None: a gradient not asked for, or one that autograd may not make."""
        if message.op is Op.F:
            return False
        return not self.itinerary.brings_one(message) or (stage, message.downstream) in self.frozen

    def _mask(self, message: Message, stage: int) -> torch.Tensor | None:
        """The frame whose bitmap says where the gradient ``message`` matters."""
        if message.op is Op.F or not message.masked:
            return None
        frame = self.kept[stage, message.downstream]
        return frame.buffer[: frame.num_bytes]


def _name(message: Message, itinerary: Itinerary) -> str:
    what = "the gradient of" if message.op is Op.B else "the value"
    way = f"from stage {message.source} on rank {itinerary.rank_of[message.source]}"
    return f"{what} {itinerary.value(message).name} of micro-batch {message.micro_batch}, {way}"


def _check_tensor(message: Message, value: Value, tensor: torch.Tensor) -> None:
    """Refuse what the receiver does not expect, or would get in another geometry than it has here."""
    if (tuple(tensor.shape), tensor.dtype) != (value.shape, value.dtype):
        found = f"{tuple(tensor.shape)} {tensor.dtype}"
        raise StageError(f"{value.name} was {value.shape} {value.dtype} when it was traced, found {found}")
    if message.op is Op.F and value.strides is not None and tensor.stride() != value.strides:
        raise StageError(
            f"{value.name} had strides {value.strides} when it was traced, found {tensor.stride()}, which "
            "its receiver refuses; lay it out the same way in every forward, or cut elsewhere"
        )
    if not geometry(tuple(tensor.shape), tensor.stride(), tensor.itemsize).travels:
        what = "the gradient of " if message.op is Op.B else ""
        raise StageError(
            f"{what}{value.name} has strides {tensor.stride()} for shape {value.shape}, which no frame "
            "keeps, and others would change the bits; cut elsewhere"
        )
