"""Frames between stages: over torch.distributed between ranks, through a dict inside one process.

Four rules carry the speed on slow links: receives are posted ahead in the sender's known order, the first
ones before the rank's first send (gloo moves nothing of a message before the receiver's ready note, which
queues behind the rank's own data); no send is waited for before the step ends, too many bytes are in flight,
or what arrives proves that it has left; buffers are pooled; an ordered channel per pair and direction needs
no dialogue."""

import contextlib
import dataclasses
import datetime
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from ...compression.buffers import Frame, Pool
from ...compression.errors import TransportError
from ..schedules.messages import Message, StepMessages
from .process_group import World, of_gloo

SIZES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)  # bytes of the probes
ENOUGH = 0.03  # seconds after which a probe has told the rate
TAG = 1 << 20  # apart from those of frames


def measured_rates(
    world: World, links: Sequence[tuple[int, int]], *, deadline: float
) -> dict[tuple[int, int], float]:
    """Return bytes per second of each link (source, target), measured one by one; collective.

    Probes grow until one takes long enough; the rate is that between the last two, so that neither latency
    nor the burst that a shaped link lets pass counts."""
    mine = [[*link, _probe(world, link, deadline)] for link in links if world.rank in link]
    rows = [row for rows in world.all_gather_json(mine) for row in rows]
    return {(source, target): rate for source, target, rate in rows if rate}


def _probe(world: World, link: tuple[int, int], deadline: float) -> float | None:
    """Pass probes along a link, and a note back; return the rate at its source, else None."""
    source, target = link
    before, rate = (0, 0.0), None
    for size in SIZES:
        data, note = torch.zeros(size, dtype=torch.uint8), torch.zeros(1)
        began = time.perf_counter()
        _pass(world, data, link, deadline)
        _pass(world, note, (target, source), deadline)
        seconds = time.perf_counter() - began
        # What a probe has more of takes a tenth of its time at least: less is noise, not a fast link.
        rate = (size - before[0]) / max(seconds - before[1], 0.1 * seconds)
        before = (size, seconds)
        note[0] = seconds > ENOUGH
        _pass(world, note, link, deadline)
        if note[0]:
            break
    return rate if world.rank == source else None


def _pass(world: World, tensor: torch.Tensor, link: tuple[int, int], deadline: float) -> None:
    source, target = link
    here = world.rank == source
    try:
        work = world.isend(tensor, target, tag=TAG) if here else world.irecv(tensor, source, tag=TAG)
        work.wait(datetime.timedelta(seconds=deadline))
    except RuntimeError as error:
        reason = world.notices.peer_failures() or of_gloo(error)
        raise TransportError(
            f"rank {world.rank} could not measure its link with rank {target if here else source} "
            f"within {deadline:g} s: {reason}"
        ) from error


class LocalTransport:
    """All stages in one process: a frame waits in a dict until its stage asks for it.

    Of all transports: ``send`` never waits, and lets go of the frame once it has left; ``receive`` returns
    one that the caller holds; ``end`` waits for what was sent, but what a later slice receives."""

    survives_failure = True  # whether another step may begin after one that failed

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.waiting: dict[Message, Frame] = {}

    def begin(self, messages: StepMessages) -> None:
        """Take back the frames of a step that failed."""
        if not messages.continues:
            for frame in self.waiting.values():
                frame.release()
            self.waiting.clear()
            self.pool.turn()

    def send(self, message: Message, frame: Frame, messages: StepMessages) -> None:
        """Keep the frame."""
        self.waiting[message] = frame

    def receive(self, message: Message) -> Frame:
        """Hand the frame over."""
        return self.waiting.pop(message)

    def end(self, messages: StepMessages) -> None:
        """Check that every frame was asked for, but those for a later slice."""
        left = self.waiting.keys() - messages.pending_out
        assert not left, f"frames that no stage asked for: {', '.join(map(str, left))}"

    def fail(self, sentence: str) -> None:
        """Nobody else is there."""


@dataclasses.dataclass(slots=True)
class _Channel:
    """Messages from one other rank, in its order: those not posted yet, and receives posted."""

    rank: int
    number: int = 0  # of messages so far; a message is known by its number on the channel
    ahead: deque[tuple[int, Message]] = dataclasses.field(default_factory=deque)
    posted: dict[Message, tuple[dist.Work, torch.Tensor]] = dataclasses.field(default_factory=dict)


class GlooTransport:
    """Frames over the group of a world; between stages of one rank through a LocalTransport.

    Any wait may take ``deadline`` seconds; frames arrive in buffers of ``pool``."""

    survives_failure = False  # other ranks may stand anywhere in the program

    def __init__(self, world: World, *, deadline: float, pool: Pool) -> None:
        self.world, self.rank, self.pool = world, world.rank, pool
        self.deadline = datetime.timedelta(seconds=deadline)
        self.max_in_flight = 1 << 28  # bytes of unfinished sends after which the oldest is waited for
        self.local = LocalTransport(pool)
        self.channels: dict[int, _Channel] = {}
        self.sent_to: dict[int, int] = {}
        self.sending: deque[tuple[dist.Work, Frame, Message]] = deque()
        self.in_flight = 0  # bytes in ``sending``
        self.proofs: Mapping[Message, Message] = {}

    def begin(self, messages: StepMessages) -> None:
        """Post the first receives of every channel, before anything is sent."""
        self.local.begin(messages)
        self.proofs = messages.proofs
        if not messages.continues:
            self.channels, self.sent_to = {}, {}
        # 1. Append what will come to each channel, in the order of its sender.
        for (source, target), coming in messages.channels.items():
            if target == self.rank:
                channel = self.channels.setdefault(source, _Channel(source))
                channel.ahead.extend(enumerate(coming, start=channel.number))
                channel.number += len(coming)
        # 2. Receives are posted ahead, before the first send of this rank.
        for channel in self.channels.values():
            while len(channel.posted) < messages.window and channel.ahead:
                self._post(channel)

    def send(self, message: Message, frame: Frame, messages: StepMessages) -> None:
        """Hand the frame to gloo's own thread."""
        target = message.ranks[1]
        if target == self.rank:
            return self.local.send(message, frame, messages)
        number = self.sent_to[target] = self.sent_to.get(target, -1) + 1
        with self._bounded(message, frame.num_bytes, "could not be sent to", target):
            work = self.world.isend(frame.buffer[: frame.num_bytes], target, tag=number)
        self.sending.append((work, frame, message))
        self.in_flight += frame.num_bytes
        while self.in_flight > self.max_in_flight:
            # What only a later slice receives is not waited for: its receiver may wait for this rank.
            due = [place for place, sent in enumerate(self.sending) if sent[2] not in messages.pending_out]
            if len(due) < 2:
                break
            self._finish(due[0])

    def receive(self, message: Message) -> Frame:
        """Wait for the frame, and post the channel's next receive in its place."""
        source = message.ranks[0]
        if source == self.rank:
            return self.local.receive(message)
        channel = self.channels[source]
        while message not in channel.posted:
            self._post(channel)
        work, buffer = channel.posted.pop(message)
        with self._bounded(message, message.frame_bytes, "did not arrive from", source):
            work.wait(self.deadline)
        self._post(channel)
        if (last := self.proofs.get(message)) is not None:
            self._finish_until(last)
        return Frame(buffer, 0, self.pool)

    def end(self, messages: StepMessages) -> None:
        """Wait for the sends under way, but those that no rank receives before a later slice."""
        later = messages.pending_out
        while (place := next((i for i, s in enumerate(self.sending) if s[2] not in later), None)) is not None:
            self._finish(place)
        self.local.end(messages)

    def fail(self, sentence: str) -> None:
        """Leave word in the group's store; the others look there when a wait of theirs fails."""
        self.world.notices.post_failure(sentence)

    def _post(self, channel: _Channel) -> None:
        if not channel.ahead:
            return
        number, message = channel.ahead.popleft()
        buffer = self.pool.take(message.frame_bytes)
        with self._bounded(message, message.frame_bytes, "was not offered by", channel.rank):
            work = self.world.irecv(buffer, channel.rank, tag=number)
        channel.posted[message] = work, buffer

    def _finish_until(self, last: Message) -> None:
        """Free the frames up to ``last`` on its channel, which have left."""
        while any(message is last for _, _, message in self.sending):
            channel = (n for n, (_, _, message) in enumerate(self.sending) if message.ranks == last.ranks)
            self._finish(next(channel))

    def _finish(self, place: int) -> None:
        work, frame, message = self.sending[place]
        del self.sending[place]
        self.in_flight -= frame.num_bytes
        with self._bounded(message, frame.num_bytes, "was not taken by", message.ranks[1]):
            work.wait(self.deadline)
        frame.release()

    @contextlib.contextmanager
    def _bounded(self, message: Message, num_bytes: int, what: str, rank: int) -> Iterator[None]:
        """Name the message, the deadline and the reason of the rank that failed where gloo fails.

        ``num_bytes``: of the frame; where it is not there yet, of the longest that may come."""
        try:
            yield
        except RuntimeError as error:
            way = f"{num_bytes:,} bytes from stage {message.source} to stage {message.target}"
            known, reason = self.world.notices.peer_failures(), of_gloo(error)
            limit = f" within {self.deadline.total_seconds():g} s"
            if not known and re.search("reset by peer|closed by peer|Broken pipe", reason):
                limit, lost = "", "its process has ended or was killed (if nobody did that, memory ran out)"
                reason = f"{lost}, {reason}; train again, from a checkpoint with resume=auto"
            found = f"{what} rank {rank}{limit}: {known or reason}"
            raise TransportError(f"{message}, {way}, {found}") from error
