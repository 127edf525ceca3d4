"""Frames of a GPU over gloo: through pinned memory, by a thread that waits in the place of the computing.

Works over any network, between two ranks on one GPU, and between a GPU and a CPU: their frames are the same.

    send      pack on a stream -> queue -> the sender waits, copies to a pinned slab, writes the header
    receive   gloo writes into a pinned slab, for which the training thread waits
Source: claims A2, A3, A8 of CN115016937A."""

from __future__ import annotations

import functools

from ...compression.frame import header_bytes, write_header
from ...compression.pool import Frame
from ...stages.device import Device
from ...stages.worker import Worker
from ..schedules.messages import Message, StepMessages
from .device_frame import DeviceFrame, DevicePool
from .transport import GlooTransport, LocalTransport, Transport
from .world import World

_MANY = 1 << 20  # frames that may wait for the sender: the training thread never does


class StagedTransport:
    """Passes frames that lie on ``device``, and those on the host, in the order in which they were sent."""

    survives_failure = False

    def __init__(self, world: World, *, device: Device, deadline: float) -> None:
        self.device = device
        self.pool, self.slabs = DevicePool(device, pinned=True), DevicePool(device, pinned=True)
        self.gloo = GlooTransport(world, deadline=deadline, pool=self.pool)
        self.copying, self.sender = device.stream(), Worker("penstock-sender", depth=_MANY)

    def begin(self, messages: StepMessages) -> None:
        """Post the first receives of every channel, before anything is sent."""
        self.gloo.begin(messages)

    def send(self, message: Message, frame: Frame, messages: StepMessages) -> None:
        """Queue the frame for the sender; one for this rank itself stays where it is."""
        if message.ranks[1] == self.gloo.rank:
            return self.gloo.local.send(message, frame, messages)
        self.sender.submit(functools.partial(self._send, message, frame, messages))

    def receive(self, message: Message) -> Frame:
        """Wait for the frame, which then lies in pinned memory, unless it comes from this rank itself."""
        self.sender.check()
        return self.gloo.receive(message)

    def end(self, messages: StepMessages) -> None:
        """Wait until everything sent has left, but what a later slice receives."""
        self.sender.drain()
        self.gloo.end(messages)

    def fail(self, sentence: str) -> None:
        """Leave word for the other ranks."""
        self.gloo.fail(sentence)

    def _send(self, message: Message, frame: Frame, messages: StepMessages) -> None:
        """In the sender's thread: wait for the frame, bring it to the host, and send it."""
        if isinstance(frame, DeviceFrame):
            frame = self._brought(frame)
        self.gloo.send(message, frame, messages)

    def _brought(self, frame: DeviceFrame) -> Frame:
        """The same frame in a pinned slab, which nobody holds but the caller; lets go of the other one."""
        header, start = frame.header, header_bytes(len(frame.header.sizes))
        slab, there, end = self.slabs.take(frame.num_bytes), frame.buffer, frame.num_bytes
        copied = self.copying.submit(
            lambda: slab[start:end].copy_(there[start:end], non_blocking=True), after=[frame.written]
        )
        write_header(slab, header)
        copied.wait()
        frame.release()
        return Frame(slab, end, self.slabs)


def transport_of(world: World, *, device: Device, deadline: float) -> Transport:
    """What carries the frames of a pipeline in ``world``, whose ranks compute on whatever they have."""
    if world.is_alone:
        return LocalTransport()
    if device.is_gpu:
        return StagedTransport(world, device=device, deadline=deadline)
    return GlooTransport(world, deadline=deadline)
