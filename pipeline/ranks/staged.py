"""Frames of a GPU over gloo: through pinned memory, by a thread that waits in the place of the computing.

Works over any network, between two ranks on one GPU, and between a GPU and a CPU: their frames are the same.

    send      pack on a stream -> queue -> the sender waits, copies to a pinned slab, writes the header
    receive   gloo writes into a pinned slab, for which the training thread waits
Source: claims A2, A3, A8 of CN115016937A."""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from torch.distributed import ProcessGroup

from ...compression.buffers import Frame
from ...compression.frame import MAX_HEADER_BYTES, header_bytes, parse_header, write_header
from ...stages.device import Device
from ...stages.worker import Worker
from ..schedules.messages import Message, StepMessages
from .device_frame import DeviceFrame, DevicePool
from .transport import GlooTransport
from .world import World

_MANY = 1 << 20  # frames that may wait for the sender: the training thread never does


class Direct(NamedTuple):
    """How payloads go from device to device, to and from one other rank: its number in the groups.

    A group for each way, so that one cannot wait for the other."""

    peer: int
    outgoing: ProcessGroup
    incoming: ProcessGroup


class StagedTransport:
    """Passes frames that lie on ``device``, and those on the host, in the order in which they were sent.

    Args:    direct: by rank, how payloads go there without the host, as by NCCL. Its header goes over gloo
             all the same: the receiver must know the length, and checks what was promised before it takes
             memory for it."""

    survives_failure = False

    def __init__(
        self, world: World, *, device: Device, deadline: float, direct: Mapping[int, Direct] | None = None
    ) -> None:
        self.device, self.direct = device, direct or {}
        self.pool, self.slabs = DevicePool(device, pinned=True), DevicePool(device, pinned=True)
        self.gloo = GlooTransport(world, deadline=deadline, pool=self.pool)
        self.buffers, self.coming = DevicePool(device), device.stream()
        self.ahead: dict[int, deque[Message]] = {}
        self.came: dict[Message, Frame] = {}
        self.copying, self.sender = device.stream(), Worker("penstock-sender", depth=_MANY)

    def begin(self, messages: StepMessages) -> None:
        """Post the first receives of every channel, before anything is sent."""
        self.gloo.begin(messages)
        if not messages.continues:
            self.ahead, self.came = {}, {}
        for source in self.direct:
            coming = messages.channels.get((source, self.gloo.rank), ())
            self.ahead.setdefault(source, deque()).extend(coming)

    def send(self, message: Message, frame: Frame, messages: StepMessages) -> None:
        """Queue the frame for the sender; one for this rank itself stays where it is."""
        if message.ranks[1] == self.gloo.rank:
            return self.gloo.local.send(message, frame, messages)
        self.sender.submit(functools.partial(self._send, message, frame, messages))

    def receive(self, message: Message) -> Frame:
        """Wait for the frame, which then lies in pinned memory, unless it comes from this rank itself."""
        self.sender.check()
        if message.ranks[0] not in self.direct:
            return self.gloo.receive(message)
        while message not in self.came:  # what a GPU sends is taken in the order in which it was sent
            first = self.ahead[message.ranks[0]].popleft()
            self.came[first] = self._taken(first)
        return self.came.pop(message)

    def end(self, messages: StepMessages) -> None:
        """Wait until everything sent has left, but what a later slice receives."""
        self.sender.drain()
        self.gloo.end(messages)

    def fail(self, sentence: str) -> None:
        """Leave word for the other ranks."""
        self.gloo.fail(sentence)

    def _send(self, message: Message, frame: Frame, messages: StepMessages) -> None:
        """In the sender's thread: wait for the frame, bring it to the host, and send it."""
        if not isinstance(frame, DeviceFrame):
            return self.gloo.send(message, frame, messages)
        if message.ranks[1] not in self.direct:
            return self.gloo.send(message, self._brought(frame), messages)
        header, target = self.slabs.take(MAX_HEADER_BYTES), message.ranks[1]
        start, end = write_header(header, frame.header), frame.num_bytes
        self.gloo.send(message, Frame(header, start, self.slabs), messages)
        group, payload = self.direct[target].outgoing, frame.buffer[start:end]
        if end > start:
            peer = self.direct[target].peer
            sent = self.copying.submit(lambda: group.send([payload], peer, 0).wait(), after=[frame.written])
            frame.uses.append(sent)
        frame.release()

    def _taken(self, message: Message) -> Frame:
        """The next frame of a rank whose payload comes from device to device, behind its header."""
        slab, known = self.gloo.receive(message), self.direct[message.ranks[0]]
        text = slab.buffer[:MAX_HEADER_BYTES].numpy().tobytes()
        header = parse_header(text, sys.maxsize)  # its payload comes another way
        if message.promise.number or header.dtype is None:
            return slab
        message.promise.hold(header)
        slab.release()
        start = header_bytes(len(header.sizes))
        buffer, group = self.buffers.take(start + header.payload_bytes), known.incoming
        payload = buffer[start : start + header.payload_bytes]
        task = (lambda: group.recv([payload], known.peer, 0).wait()) if payload.numel() else (lambda: None)
        return DeviceFrame(buffer, self.buffers, self.coming.submit(task), header=header)

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
