"""Frames of stages on a device: packed and unpacked on streams of their own, while the stage computes on.

    send      pack on a stream, behind what was computed by now; the transport asks how long the frame became
    receive   copy and unpack on another stream; the computing waits for that, this thread does not
    end       was any payload at odds with itself? One copy to the host for all frames of a step

What is packed late is not written to meanwhile: a value that layers write to is not cut from them, a stage
that exchanges its weights sends copies, and a parameter is updated when its gradients have come back."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...compression.buffers import Frame
from ...compression.codec import buffer_bytes
from ...compression.errors import CodecError, StageError
from ...compression.frame import FrameSpec, Header, header_bytes, read_header
from ...stages.device import Device
from ...stages.stage.stage import Stage
from ..distributed.gpu_transport import DeviceFrame, DevicePool, Transport
from ..schedules.instruction import Instruction
from ..schedules.messages import Message
from .auto_codec import Policy
from .frames import Frames
from .meter import Meter
from .step_planner import Step

T = TypeVar("T")
Marks = Mapping[Device, Any]  # one point in the course of each device


class _Passed(NamedTuple):
    """A queued instruction: its marks, those of its waits and packings, and the bytes it sent."""

    instruction: Instruction
    marks: tuple[Marks, Marks]
    waits: list[tuple[Marks, Marks]]
    packings: list[tuple[Device, Any, Any]]
    sent: list[tuple[Message, int, Frame, str]]


class DeviceMeter(Meter):
    """Counts as ``Meter`` does, by the clocks of ``devices``; how long a frame became is known at the end."""

    def __init__(self, rank: int, stages: Mapping[int, Stage], devices: Mapping[int, Device]) -> None:
        self.devices, self.several = devices, tuple(dict.fromkeys(devices.values()))
        self.now = self._marks
        self.passed: list[_Passed] = []
        self._forget()
        super().__init__(rank, stages)

    def _marks(self) -> Marks:
        return {device: device.now() for device in self.several}

    def _forget(self) -> None:
        self.waits: list[tuple[Marks, Marks]] = []
        self.packings: list[tuple[Device, Any, Any]] = []
        self.noted: list[tuple[Message, int, Frame, str]] = []

    def begin(self, step: Step) -> None:
        """A step begins."""
        self.passed = []
        self._forget()
        super().begin(step)

    def timed(self, device: Device, task: Callable[[], T]) -> Callable[[], T]:
        """``task``, whose seconds on a stream of ``device`` count as packing."""
        packings = self.packings

        def run() -> T:
            begin = device.now()
            value = task()
            packings.append((device, begin, device.now()))
            return value

        return run

    def sent(self, message: Message, raw: int, frame: Frame, codec: str) -> None:
        """A message was sent: ``raw`` bytes in ``frame``."""
        self.noted.append((message, raw, frame, codec))

    def stop(self, instruction: Instruction, started: Marks) -> None:
        """The instruction that began at ``started`` was queued; the next one may begin."""
        marks = started, self._marks()
        self.passed.append(_Passed(instruction, marks, self.waits, self.packings, self.noted))
        self._forget()

    def end(self) -> None:
        """The step has ended: read all marks."""
        for device in self.several:
            device.synchronize()
        for instruction, (start, end), waits, packings, sent in self.passed:
            for message, raw, frame, codec in sent:
                super().sent(message, raw, frame, codec)
            device = self.devices[instruction.stage]
            self.waited = sum(device.seconds(begin[device], until[device]) for begin, until in waits)
            self.packing = sum(where.seconds(begin, until) for where, begin, until in packings)
            began = self.began[device]
            self._note(instruction, device.seconds(began, start[device]), device.seconds(began, end[device]))
        super().end()


class _Lanes:
    """Resources of one device next to its computing: kernels, buffers, and a stream for each direction."""

    def __init__(self, device: Device) -> None:
        self.device, self.kernels, self.buffers = device, device.kernels, DevicePool(device)
        self.packing, self.unpacking = device.stream(), device.stream()

    def brought(self, frame: Frame, header: Header) -> DeviceFrame:
        """Move a frame from pinned memory or another device to this one; release it once it is read."""
        size = header_bytes(len(header.sizes)) + header.payload_bytes
        there, here = self.buffers.take(size), frame.buffer
        after = [frame.written] if isinstance(frame, DeviceFrame) else []
        copied = self.unpacking.submit(
            lambda: there[:size].copy_(here[:size], non_blocking=True), after=after
        )
        self.buffers.give_behind([copied], frame.release)
        return DeviceFrame(there, self.buffers, copied, header=header)


class DeviceFrames(Frames):
    """Does what ``Frames`` does for stages that compute on ``devices``; None travels as on the host.
    ``flags`` say on the device whether a payload was at odds with itself, by the message that brought it."""

    meter: DeviceMeter

    def __init__(
        self, transport: Transport, *, policy: Policy, meter: DeviceMeter, devices: Mapping[int, Device]
    ) -> None:
        super().__init__(transport, policy=policy, meter=meter, noted=False)
        lanes = {device: _Lanes(device) for device in dict.fromkeys(devices.values())}
        self.lanes = {stage: lanes[device] for stage, device in devices.items()}
        self.flags: list[tuple[Message, Tensor]] = []

    def end(self, step: Step) -> None:
        """Wait for what was sent, and refuse what came damaged."""
        super().end(step)
        flags, self.flags = self.flags, []
        by_device = defaultdict[torch.device, list[tuple[Message, Tensor]]](list)
        for message, flag in flags:
            by_device[flag.device].append((message, flag.reshape(())))
        for rows in by_device.values():
            wrong = torch.stack([flag for _, flag in rows]).tolist()
            for message in (message for (message, _), flag in zip(rows, wrong, strict=True) if flag):
                rule = "bitmap, offsets and values of a frame agree"
                place = f"from stage {message.source} on rank {message.ranks[0]}"
                raise CodecError(f"{message}, {place}: {rule}, these do not; it was damaged")

    def _unpack(self, message: Message, step: Step) -> Any:
        begin = self.meter.now()
        item = super()._unpack(message, step)
        self.meter.waits.append((begin, self.meter.now()))
        return item

    def _opened(
        self, message: Message, frame: Frame, promise: FrameSpec, mask: Frame | None
    ) -> tuple[Frame, Any, bool]:
        lanes = self.lanes[message.target]
        if isinstance(frame, DeviceFrame):
            header = frame.header
        else:
            header = read_header(frame.buffer, pooled=True)
            if header.dtype is None:
                return super()._opened(message, frame, promise, mask)
        promise.check(header)
        if not isinstance(frame, DeviceFrame) or frame.pool is not lanes.buffers:
            frame = lanes.brought(frame, header)
        known, after = None, [frame.written]
        if isinstance(mask, DeviceFrame):
            known = mask.header, mask.buffer
            after.append(mask.written)
        task = partial(lanes.kernels.unpack, header, frame.buffer, mask=known)
        unpacked = lanes.unpacking.submit(self.meter.timed(lanes.device, task), after=after)
        for used in (frame, mask):
            if isinstance(used, DeviceFrame):
                used.uses.append(unpacked)
        lanes.device.wait_for(unpacked)
        item, flag = unpacked.value
        lanes.device.use(item)
        self.flags.append((message, flag))
        return frame, item, header.requires_grad

    def _pack(self, message: Message, item: Any, codec: str, *, observed: bool) -> Frame:
        if item is None:
            return super()._pack(message, item, codec, observed=observed)
        lanes = self.lanes[message.source]
        tensor, name, mask, asks = self._checked(message, item, codec, observed)
        assert tensor is not None, "None travels on the host"
        if tensor.device != lanes.device.torch:
            raise StageError(
                f"{message.name} is on {tensor.device} while its stage computes on {lanes.device.torch}, and "
                "another stage reads it; make it there, or cut elsewhere"
            )
        known, after = None, [lanes.device.reached()]
        if isinstance(mask, DeviceFrame):
            known = mask.header, mask.buffer
            after.append(mask.written)
        promise = message.promise
        buffer = lanes.buffers.take(buffer_bytes(promise.sizes, promise.dtype, name))
        pack = partial(lanes.kernels.pack, tensor, buffer, name, requires_grad=asks, mask=known)
        packed = lanes.packing.submit(self.meter.timed(lanes.device, pack), after=after, reads=[tensor])
        if isinstance(mask, DeviceFrame):
            mask.uses.append(packed)
        return DeviceFrame(buffer, lanes.buffers, packed, told=lanes.kernels.header_of)


def frames_of(
    devices: Mapping[int, Device],
    transport: Transport,
    *,
    rank: int,
    stages: Mapping[int, Stage],
    policy: Policy,
) -> tuple[Meter, Frames]:
    """Return the meter and the frames of ``stages``, which compute on ``devices``."""
    if any(device.is_gpu for device in devices.values()):
        meter = DeviceMeter(rank, stages, devices)
        return meter, DeviceFrames(transport, policy=policy, meter=meter, devices=devices)
    meter, noted = Meter(rank, stages), any(stage.stores for stage in stages.values())
    return meter, Frames(transport, policy=policy, meter=meter, noted=noted)
