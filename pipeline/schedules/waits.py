"""The programs of all ranks in a dry run through bounded channels: do they wait for each other?

A frame travels on the channel of its ordered pair of ranks. The model of a channel is pessimistic: a rank
goes on only when receives are posted for all it sent, and a receiver has `window` receives posted beyond
those it consumed, in the order of the sender's program (an instruction sends to the nearest stage first).
A window counts instructions: where one sends several values, the transport posts a receive for each.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from ...compression.errors import ScheduleError
from .instruction import Instruction, Op

Edges = Sequence[tuple[int, int]]
Programs = Sequence[Sequence[Instruction]]
Channel = tuple[int, int]
RankOf = Callable[[int, int], int]  # who runs a stage for a micro-batch
Sent = tuple[int, int, int, Op]  # source stage, target stage, micro-batch, F or B

_WAY = {Op.F: Op.F, Op.B: Op.B, Op.I: Op.B}  # I sends up what B would; W and U pass nothing on


class CircularWait(ScheduleError):
    """Ranks wait for each other; a larger window may help."""


class PaperRun:
    """One run of all programs in which nothing is computed and every wait is counted."""

    def __init__(self, programs: Programs, edges: Edges, rank_of: RankOf, window: int) -> None:
        self.programs, self.rank_of, self.window = programs, rank_of, window
        self.targets: dict[tuple[int, Op], list[int]] = defaultdict(list)
        self.sources: dict[tuple[int, Op], list[int]] = defaultdict(list)
        for source, target in sorted(set(edges), key=lambda edge: edge[1] - edge[0]):  # nearest stage first
            for sender, receiver, way in ((source, target, Op.F), (target, source, Op.B)):
                self.targets[sender, way].append(receiver)
                self.sources[receiver, way].append(sender)
        self.number: dict[Sent, int] = {}  # among the messages of its channel
        self.maker: dict[Sent, Instruction] = {}
        lengths: Counter[Channel] = Counter()
        for program in programs:
            for instruction in program:
                for message in self.sends(instruction):
                    self.maker[message] = instruction
                    self.number[message] = lengths[self.channel(message)]
                    lengths[self.channel(message)] += 1
        self.consumed: Counter[Channel] = Counter()
        self.made: set[Sent] = set()
        self.arrived: set[Sent] = set()
        self.order: list[Instruction] = []
        self.place = [0] * len(programs)
        self.ran = [False] * len(programs)  # the rank's next instruction, which it has yet to leave

    def channel(self, message: Sent) -> Channel:
        """From the rank of the sender to that of the receiver."""
        source, target, micro_batch, _ = message
        return self.rank_of(source, micro_batch), self.rank_of(target, micro_batch)

    def sends(self, instruction: Instruction) -> list[Sent]:
        """What the instruction makes for other stages, its own rank's included."""
        stage, way, index = instruction.stage, _WAY.get(instruction.op), instruction.micro_batch
        if way is None or index is None:
            return []
        return [(stage, target, index, way) for target in self.targets[stage, way]]

    def receives(self, instruction: Instruction) -> list[Sent]:
        """What the instruction waits for and does not have yet."""
        stage, way, index = instruction.stage, _WAY.get(instruction.op), instruction.micro_batch
        if way is None or index is None:
            return []
        messages = [(source, stage, index, way) for source in self.sources[stage, way]]
        return [message for message in messages if message not in self.arrived]

    def posted(self, message: Sent) -> bool:
        """Whether the receiver has posted a receive for it; on one rank nothing is posted."""
        channel = self.channel(message)
        return channel[0] == channel[1] or self.number[message] < self.consumed[channel] + self.window

    def unposted(self, instruction: Instruction) -> list[Sent]:
        """What the instruction sends that no receive is posted for yet."""
        return [message for message in self.sends(instruction) if not self.posted(message)]

    def advance(self, rank: int) -> bool:
        """Take what has arrived, then run the rank's next instruction, then leave it: as far as that goes."""
        instruction = self.programs[rank][self.place[rank]]
        before = len(self.arrived), len(self.order), self.place[rank]
        for message in self.receives(instruction):
            if message in self.made and self.posted(message):
                self.arrived.add(message)
                self.consumed[self.channel(message)] += 1
        if not self.ran[rank] and not self.receives(instruction):
            self.ran[rank] = True
            self.made.update(self.sends(instruction))
            self.order.append(instruction)
        if self.ran[rank] and not self.unposted(instruction):
            self.ran[rank] = False
            self.place[rank] += 1
        return before != (len(self.arrived), len(self.order), self.place[rank])

    def finish(self) -> list[Instruction]:
        """Run to the end; raises where no rank can go on."""
        while waiting := [
            rank for rank, program in enumerate(self.programs) if self.place[rank] < len(program)
        ]:
            if not any([self.advance(rank) for rank in waiting]):
                reasons = "; ".join(self.reason(rank) for rank in waiting)
                raise CircularWait(
                    f"the programs wait for each other with {self.window} receives posted ahead: {reasons}"
                )
        return self.order

    def reason(self, rank: int) -> str:
        """Why the rank cannot go on."""
        instruction = self.programs[rank][self.place[rank]]
        if self.ran[rank]:
            receiver = self.channel(self.unposted(instruction)[0])[1]
            return f"rank {rank} cannot send what {instruction} made before rank {receiver} posts a receive"
        return f"rank {rank} needs {self.maker[self.receives(instruction)[0]]} for {instruction}"
