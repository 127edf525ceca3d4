"""Frames of this process's stages: a tensor is packed once, and its frame kept while anybody needs it again.

The frame that goes downstream, the one that the next user of the value gets, and the one whose bitmap the
gradient reuses on its way back are the same bytes in the same storage. A frame belongs to its message.
One module packs on every path out of a stage, and unpacks once.

    stage 0                   stage 1                                        stage 2
    pack value -> sent        receive -> arrived, unpack
                              send on: the frame that arrived (forwarded)    receive -> arrived, unpack
                              pack gradient by the bitmap of arrived      <- pack gradient by its bitmap
    unpack by bitmap of sent  release arrived"""

import time
from collections.abc import Mapping
from typing import Any

import torch

from ...compression.buffers import Frame
from ...compression.codec import buffer_bytes, decode_received, pack_into
from ...compression.errors import CodecError, StageError
from ...compression.frame import FrameSpec
from ...compression.geometry import geometry
from ..distributed.gpu_transport import Transport
from ..schedules.instruction import Instruction
from ..schedules.messages import Message
from .auto_codec import MASKED, Policy
from .meter import Meter
from .step_planner import Step


class Frames:
    """Brings an instruction what it works on, and sends what it made.

    ``arrived`` has the frames of values as they came, ``sent`` those whose bitmap a gradient reuses on its
    way back, by message; ``packed`` has by number what a forward packed and sent, with its frame, if a store
    of saved tensors wants it (``noted``). ``frozen`` has, by stage at either end, the messages whose value
    was frozen since the trace and asks for no gradient now."""

    def __init__(self, transport: Transport, *, policy: Policy, meter: Meter, noted: bool) -> None:
        self.transport, self.policy, self.meter, self.noted = transport, policy, meter, noted
        self.arrived: dict[Message, Frame] = {}
        self.sent: dict[Message, Frame] = {}
        self.packed: dict[int, tuple[torch.Tensor, Frame]] = {}
        self.frozen: set[tuple[int, Message]] = set()
        self.tied: dict[tuple[int, str], Any] = {}

    def begin(self, step: Step) -> None:
        """Get ready for a step; let go of what a failed one kept, and of the last one's tied parameters."""
        self.tied.clear()
        if not step.messages.continues:
            for frame in (*self.arrived.values(), *self.sent.values()):
                frame.release()
            self.arrived.clear()
            self.sent.clear()
            self.frozen.clear()
            self._forget_packed()
        self.transport.begin(step.messages)

    def end(self, step: Step) -> None:
        """Wait for what was sent."""
        self.transport.end(step.messages)

    def gather_inputs(self, step: Step, instruction: Instruction) -> dict[int, Any]:
        """Gather a forward's inputs by number: received values, tied parameters, the model's inputs."""
        stage, index = instruction.stage, instruction.micro_batch or 0
        route = step.messages.routes[index][stage]
        items = self.receive(step, instruction)
        for number in route.tied:  # which may be another for a micro-batch of another size
            place = stage, route.record.values[number].name
            if number in items:
                self.tied[place] = items[number]
            else:  # it came with the first micro-batch of the step
                items[number] = self.tied[place]
        if route.inputs:
            items.update(zip(route.inputs, step.micro_batches[index].inputs, strict=True))
        return items

    def receive(self, step: Step, instruction: Instruction) -> dict[int, Any]:
        """Receive the frames of an instruction; for a backward the gradients of what its forward sent."""
        return {m.value: self._unpack(m, step) for m in step.messages.receives[instruction]}

    def send_outputs(self, step: Step, instruction: Instruction, items: Mapping[int, Any]) -> None:
        """Send values or gradients, each in the frame in which it came if it did."""
        for message in step.messages.sends[instruction]:
            item, codec = items[message.value], self.policy.codec(message.flow)
            if message.forwarded is None:
                frame = self._pack(message, item, codec, observed=message.micro_batch == step.observed)
            else:
                frame = self.arrived[message.forwarded].hold()
            if message.answers is None:
                if message.masked:
                    self.sent[message] = frame.hold()
                if message.promise.requires_grad and not item.requires_grad:
                    self.frozen.add((message.source, message))
            if step.training:
                self.meter.sent(message, 0 if item is None else message.raw_bytes, frame, codec)
            self.transport.send(message, frame, step.messages)

    def release_inputs(self, step: Step, instruction: Instruction) -> None:
        """After a forward: let go of the frames that no gradient needs."""
        for message in step.messages.receives[instruction]:
            if not message.masked:
                self.arrived.pop(message).release()
        if self.packed:
            self._forget_packed()

    def release(self, step: Step, instruction: Instruction) -> None:
        """After a backward: let go of the frames of the values whose gradients came and went."""
        messages = step.messages
        for gradients, kept in ((messages.receives, self.sent), (messages.sends, self.arrived)):
            for gradient in gradients[instruction]:
                value = gradient.answers
                assert value is not None, "a backward passes gradients"
                if self.frozen:
                    self.frozen.discard((instruction.stage, value))
                if frame := kept.pop(value, None):
                    frame.release()

    def _forget_packed(self) -> None:
        for _, frame in self.packed.values():
            frame.release()
        self.packed.clear()

    def _unpack(self, message: Message, step: Step) -> Any:
        """Wait for a frame and unpack it; a value's frame is kept as it came until it is released."""
        began = time.perf_counter()
        frame = self.transport.receive(message)
        came = time.perf_counter()
        # 1. What must have come: of a gradient the bitmap of its value, and none at all of a frozen one.
        promise, value, mask = message.promise, message.answers, None
        if value is not None:
            if message.masked:
                mask = self.sent[value]
            if self.frozen and (message.target, value) in self.frozen:
                promise = promise._replace(none=True)
        # 2. Unpack.
        try:
            frame, item, asks = self._opened(message, frame, promise, mask)
        except CodecError as error:
            place = f"from stage {message.source} on rank {message.ranks[0]}"
            raise CodecError(f"{message}, {place}: {error}") from error
        if message.micro_batch == step.observed and value is None and item is not None:
            self.policy.arriving(message, item)
        self.meter.waited += came - began
        self.meter.packing += time.perf_counter() - came
        # 3. A gradient's frame is done with; a value's is kept for its next user and its gradient.
        if value is not None:
            frame.release()
            return item
        self.arrived[message] = frame
        assert item is not None, "None is not promised for a value"
        if promise.requires_grad:
            item.requires_grad_(asks)
            if not item.requires_grad:
                self.frozen.add((message.target, message))
        return item

    def _opened(
        self, message: Message, frame: Frame, promise: FrameSpec, mask: Frame | None
    ) -> tuple[Frame, Any, bool]:
        """Return the frame, its tensor, and whether that asks for a gradient."""
        bitmap = None if mask is None else mask.bytes
        item, frame.num_bytes, asks = decode_received(frame.buffer, promise, mask=bitmap, pooled=True)
        return frame, item, asks

    def _pack(self, message: Message, item: Any, codec: str, *, observed: bool) -> Frame:
        began = time.perf_counter()
        item, name, mask, asks = self._checked(message, item, codec, observed)
        promise, pool = message.promise, self.transport.pool
        buffer = pool.take(buffer_bytes(promise.sizes, promise.dtype, name))
        bitmap = None if mask is None else mask.bytes
        num_bytes = pack_into(item, buffer, codec=name, requires_grad=asks, mask=bitmap, pooled=True)
        self.meter.packing += time.perf_counter() - began
        frame = Frame(buffer, num_bytes, pool)
        if self.noted and item is not None and message.answers is None:
            if not item.is_conj() and not item.is_neg():  # a frame holds what that means, memory what it was
                self.packed[message.value] = item, frame.hold()
        return frame

    def _checked(
        self, message: Message, item: Any, codec: str, observed: bool
    ) -> tuple[torch.Tensor | None, str, Frame | None, bool]:
        """Return the tensor to be packed, its codec, its bitmap, and whether it asks for a gradient."""
        promise, value = message.promise, message.answers
        if isinstance(item, torch.Tensor):
            if (
                item.stride() != promise.strides
                or item.shape != promise.sizes
                or item.dtype is not promise.dtype
            ):
                _check_tensor(message, item)
            if observed:
                self.policy.leaving(message, item)
        elif not promise.none and (message.source, value) not in self.frozen:
            raise StageError(
                f"a gradient comes back to {message.name}, as it was traced, found None; a loss that has "
                "nothing to learn from a micro-batch reads its outputs all the same: outputs.sum() * 0"
            )
        name, mask = codec.removeprefix(MASKED), None
        if name != codec and message.masked and value is not None:
            mask = self.arrived[value]
        asks = promise.requires_grad and (item is None or value is not None or item.requires_grad)
        return item, name, mask, asks


def _check_tensor(message: Message, tensor: torch.Tensor) -> None:
    """Refuse what the receiver does not expect, or would get in another geometry than it has here."""
    promise, name = message.promise, message.name
    if tensor.shape != promise.sizes or tensor.dtype is not promise.dtype:
        found = f"{tuple(tensor.shape)} {tensor.dtype}"
        raise StageError(f"{name} was {promise.sizes} {promise.dtype} when it was traced, found {found}")
    strides = tensor.stride()
    if strides != promise.strides and promise.strides is not None:
        raise StageError(
            f"{name} had strides {promise.strides} when it was traced, found {strides}, which "
            "its receiver refuses; lay it out the same way in every forward, or cut elsewhere"
        )
    if promise.strides is None and not geometry(tensor.shape, strides, tensor.itemsize).travels:
        what = "the gradient of " if message.answers is not None else ""
        raise StageError(
            f"{what}{name} has strides {strides} for shape {promise.sizes}, which no frame "
            "keeps, and others would change the bits; cut elsewhere"
        )
