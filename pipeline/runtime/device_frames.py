"""Frames of stages on a device: packed and unpacked on streams of their own, while the stage computes on.

    send      pack on a stream, behind what was computed by now; the transport asks how long the frame became
    receive   copy and unpack on another stream; the computing waits for that, this thread does not
    end       was any payload at odds with itself? One copy to the host for all frames of a step
Source: claims A7-A10 of CN115016937A."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...compression.codec import buffer_bytes
from ...compression.errors import CodecError, StageError
from ...compression.frame import Header, header_bytes, read_header
from ...compression.pool import Frame
from ...compression.promise import Promise
from ...stages.device import Device
from ...stages.stage.stage import Stage
from ..ranks.device_frame import DeviceFrame, DevicePool
from ..ranks.transport import Transport
from ..schedules.instruction import Instruction
from ..schedules.messages import Message
from .device_meter import DeviceMeter
from .frames import Frames
from .meter import Meter
from .policy import Policy
from .step import Step


class DeviceFrames(Frames):
    """Does what ``Frames`` does for stages that compute on ``device``.

    A number, or None, travels as on the host. ``flags`` say on the device whether a payload was at odds with
    itself, by the message that brought it."""

    meter: DeviceMeter

    def __init__(self, transport: Transport, *, policy: Policy, meter: DeviceMeter, device: Device) -> None:
        super().__init__(transport, policy=policy, meter=meter, noted=False)
        self.device, self.kernels, self.buffers = device, device.kernels, DevicePool(device)
        self.packing, self.unpacking = device.stream(), device.stream()
        self.flags: list[tuple[Message, Tensor]] = []

    def end(self, step: Step) -> None:
        """Wait for what was sent, and refuse what came damaged."""
        super().end(step)
        flags, self.flags = self.flags, []
        if flags:
            wrong = torch.stack([flag.reshape(()) for _, flag in flags]).tolist()
            for (message, _), flag in zip(flags, wrong, strict=True):
                if flag:
                    rule = "bitmap, offsets and values of a frame agree"
                    place = f"from stage {message.source} on rank {message.ranks[0]}"
                    raise CodecError(f"{message}, {place}: {rule}, these do not; it was damaged")

    def arrived_at(self, step: Step, instruction: Instruction) -> dict[int, Frame]:
        """None: a store of saved tensors packs on the device what it keeps."""
        return {}

    def _unpack(self, message: Message, step: Step) -> Any:
        begin = self.device.now()
        item = super()._unpack(message, step)
        self.meter.waits.append((begin, self.device.now()))
        return item

    def _opened(
        self, message: Message, frame: Frame, promise: Promise, mask: Frame | None
    ) -> tuple[Frame, Any, bool]:
        if isinstance(frame, DeviceFrame):
            promise.hold(frame.header)
        else:
            header = read_header(frame.buffer, pooled=True)
            if promise.number or header.dtype is None:
                return super()._opened(message, frame, promise, mask)
            promise.hold(header)
            frame = self._brought(frame, header)
        header, buffer, known, after = frame.header, frame.buffer, None, [frame.written]
        if isinstance(mask, DeviceFrame):
            known, after = (mask.header, mask.buffer), [frame.written, mask.written]
        task = partial(self.kernels.unpack, header, buffer, mask=known)
        unpacked = self.unpacking.submit(self.meter.timed(task), after=after)
        for used in (frame, mask):
            if isinstance(used, DeviceFrame):
                used.uses.append(unpacked)
        self.device.wait_for(unpacked)
        item, flag = unpacked.value
        self.device.use(item)
        self.flags.append((message, flag))
        return frame, item, header.requires_grad

    def _brought(self, slab: Frame, header: Header) -> DeviceFrame:
        """The frame in pinned memory as one on the device; lets go of the other when it was read."""
        size = header_bytes(len(header.sizes)) + header.payload_bytes
        there, here = self.buffers.take(size), slab.buffer
        copied = self.unpacking.submit(lambda: there[:size].copy_(here[:size], non_blocking=True))
        self.buffers.give_behind([copied], slab.release)
        return DeviceFrame(there, self.buffers, copied, header=header)

    def _pack(self, message: Message, item: Any, codec: str, *, observed: bool) -> Frame:
        if message.promise.number or item is None:
            return super()._pack(message, item, codec, observed=observed)
        tensor, name, mask, asks = self._checked(message, item, codec, observed)
        assert tensor is not None, "None travels on the host"
        if tensor.device != self.device.torch:
            raise StageError(
                f"{message.name} is on {tensor.device} while its stage computes on {self.device.torch}, and "
                "another stage reads it; make it there, or cut elsewhere"
            )
        known, after = None, [self.device.reached()]
        if isinstance(mask, DeviceFrame):
            known = mask.header, mask.buffer
            after.append(mask.written)
        promise = message.promise
        buffer = self.buffers.take(buffer_bytes(promise.sizes, promise.dtype, name))
        pack = partial(self.kernels.pack, tensor, buffer, name, requires_grad=asks, mask=known)
        packed = self.packing.submit(self.meter.timed(pack), after=after, reads=[tensor])
        if isinstance(mask, DeviceFrame):
            mask.uses.append(packed)
        return DeviceFrame(buffer, self.buffers, packed, told=self.kernels.header_of)


def frames_of(
    device: Device, transport: Transport, *, rank: int, stages: Mapping[int, Stage], policy: Policy
) -> tuple[Meter, Frames]:
    """What packs for ``stages``, which compute on ``device``, and what counts it."""
    if device.is_gpu:
        meter = DeviceMeter(rank, stages, device)
        return meter, DeviceFrames(transport, policy=policy, meter=meter, device=device)
    meter, noted = Meter(rank, stages), any(stage.stores for stage in stages.values())
    return meter, Frames(transport, policy=policy, meter=meter, noted=noted)
