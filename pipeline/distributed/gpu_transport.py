"""A frame on a device: its payload may still be written, and may be read after its last holder let go.

So a buffer goes back to its pool after the work that uses it. Only the device knows a frame's length and
codec; they are asked for where nothing goes on without."""

import functools
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ...compression.buffers import Frame, Pool, new_bytes
from ...compression.frame import MAX_HEADER_BYTES, Header, header_bytes, parse_header, write_header
from ...stages.device import Device
from ...stages.worker import Work, Worker
from ..schedules.messages import Message, StepMessages
from .process_group import World, group_of, thread_of
from .transport import GlooTransport, LocalTransport


class DevicePool(Pool):
    """Buffers on a device, or pinned ones beside it: one is lent again when the work that uses it is done."""

    def __init__(self, device: Device, *, pinned: bool = False) -> None:
        super().__init__()
        self._device, self._pinned, self._making = device, pinned, device.stream()
        self._behind: deque[tuple[Sequence[Work[Any]], Callable[[], None]]] = deque()

    def take(self, num_bytes: int) -> Tensor:
        """Lend a buffer that no work uses any more."""
        for _ in range(len(self._behind)):
            self._settle(*self._behind.popleft())
        return super().take(num_bytes)

    def give_behind(self, works: Sequence[Work[Any]], give: Callable[[], None]) -> None:
        """Call ``give``, which gives a buffer back, when ``works`` are done; by ``take`` at the latest."""
        self._settle(works, give)

    def _settle(self, works: Sequence[Work[Any]], give: Callable[[], None]) -> None:
        if all(work.done for work in works):
            give()
        else:
            self._behind.append((works, give))

    def _new(self, size: int) -> Tensor:
        self._sizes.append(size)
        if self._pinned:
            return self._device.pinned(size)
        # On a stream where nothing else was: what computing has freed may still be read by what is queued.
        made = self._making.submit(lambda: new_bytes(size, self._device.torch))
        made.wait()
        return made.value


class DeviceFrame(Frame):
    """A packed tensor on a device, ``written`` by this work; ``uses``: all that works with its buffer."""

    __slots__ = ("_header", "_told", "uses", "written")

    pool: DevicePool

    def __init__(
        self,
        buffer: Tensor,
        pool: DevicePool,
        written: Work[Any],
        *,
        header: Header | None = None,
        told: Callable[[Work[Any]], Header] | None = None,
    ) -> None:
        """Hold ``buffer``, lent by ``pool``, with its ``header`` or what returns that once it is known."""
        super().__init__(buffer, 0, pool)
        self.written, self.uses = written, [written]
        self._header, self._told = header, told
        if header is not None:
            self.num_bytes = header_bytes(len(header.sizes)) + header.payload_bytes

    @property
    def header(self) -> Header:
        """Header of the frame; waits where only the device has it."""
        if self._header is None:
            assert self._told is not None, "a frame without a header asks for it"
            self._header, self._told = self._told(self.written), None
            self.num_bytes = header_bytes(len(self._header.sizes)) + self._header.payload_bytes
        return self._header

    def release(self) -> None:
        """Let go of the frame, once per holder."""
        assert self._holders, "a frame is released once per holder"
        if self._holders.pop():
            self.pool.give_behind(self.uses, lambda: self.pool.give(self.buffer))


_MANY = 1 << 20  # frames that may wait for the sender: the training thread never does


class Direct(NamedTuple):
    """Groups for payloads from device to device, one for each direction, and the number of the other rank."""

    peer: int
    outgoing: ProcessGroup
    incoming: ProcessGroup


class StagedTransport:
    """Passes frames that lie on ``device``, and those on the host, in the order in which they were sent.

    ``direct``: by rank, the way of payloads without the host. Their headers go over gloo all the same: the
    receiver must know the length, and checks what was promised before it takes memory for it."""

    survives_failure = False

    def __init__(
        self, world: World, *, device: Device, deadline: float, direct: Mapping[int, Direct]
    ) -> None:
        self.device, self.direct = device, direct
        self.pool, self.slabs = DevicePool(device, pinned=True), DevicePool(device, pinned=True)
        self.gloo = GlooTransport(world, deadline=deadline, pool=self.pool)
        self.buffers, self.coming = DevicePool(device), device.stream()
        self.ahead: dict[int, deque[Message]] = {}
        self.came: dict[Message, Frame] = {}
        self.copying, self.sender = device.stream(), Worker("penstock-sender", depth=_MANY)

    def begin(self, messages: StepMessages) -> None:
        """Post the first receives of every channel, before anything is sent."""
        self.gloo.begin(messages)
        self.gloo.proofs = {}  # the sender's thread alone knows what is on its way
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
        """Receive a frame whose header comes first and whose payload comes from device to device."""
        slab, known = self.gloo.receive(message), self.direct[message.ranks[0]]
        text = slab.buffer[:MAX_HEADER_BYTES].numpy().tobytes()
        header = parse_header(text, sys.maxsize)  # its payload comes another way
        if header.dtype is None:
            return slab
        message.promise.check(header)
        slab.release()
        start = header_bytes(len(header.sizes))
        buffer, group = self.buffers.take(start + header.payload_bytes), known.incoming
        payload = buffer[start : start + header.payload_bytes]
        task = (lambda: group.recv([payload], known.peer, 0).wait()) if payload.numel() else (lambda: None)
        return DeviceFrame(buffer, self.buffers, self.coming.submit(task), header=header)

    def _brought(self, frame: DeviceFrame) -> Frame:
        """Move the frame to a pinned slab that only the caller holds, and release the other one."""
        header, start = frame.header, header_bytes(len(frame.header.sizes))
        slab, there, end = self.slabs.take(frame.num_bytes), frame.buffer, frame.num_bytes
        copied = self.copying.submit(
            lambda: slab[start:end].copy_(there[start:end], non_blocking=True), after=[frame.written]
        )
        write_header(slab, header)
        copied.wait()
        frame.release()
        return Frame(slab, end, self.slabs)


Transport = LocalTransport | GlooTransport | StagedTransport


def transport_of(
    world: World, *, device: Device, gpus: Sequence[str | None], deadline: float, pool: Pool
) -> Transport:
    """Return the transport of a pipeline's frames; ``gpus``: ``identity_of`` by rank; collective."""
    if world.is_alone:
        return LocalTransport(pool)
    direct = direct_routes(world, gpus, deadline=deadline)
    if device.is_gpu:
        return StagedTransport(world, device=device, deadline=deadline, direct=direct)
    return GlooTransport(world, deadline=deadline, pool=pool)


def identity_of(device: Device) -> str | None:
    """Return the name of the GPU ``device`` for other ranks; None where it is none, or there is no NCCL."""
    return device.identity if dist.is_nccl_available() else None


def direct_routes(world: World, gpus: Sequence[str | None], *, deadline: float) -> dict[int, Direct]:
    """Make the routes from this rank's GPU to the others, by rank; collective among the ranks with one."""
    mine, ranks = gpus[world.rank], [rank for rank, identity in enumerate(gpus) if identity]
    if mine is None or len({gpus[rank] for rank in ranks}) < 2 or thread_of(world.group) is not None:
        return {}  # to NCCL a process is a rank
    assert world.group is not None, "a world of several ranks has a group"
    members = [dist.get_process_group_ranks(world.group)[rank] for rank in ranks]
    down, up = (group_of(members, "nccl", deadline=deadline) for _ in range(2))
    return {
        rank: Direct(ranks.index(rank), *((down, up) if rank > world.rank else (up, down)))
        for rank in ranks
        if gpus[rank] != mine
    }
