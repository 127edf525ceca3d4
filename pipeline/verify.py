"""Is a schedule legal: the programs of all ranks are checked, and run once without a device.

A step that would deadlock or change a bit is refused before any rank starts, while the reason can be named.

A frame travels on the channel of its ordered pair of ranks. The model of a channel is pessimistic: a rank
goes on only when receives are posted for all it sent, and a receiver has `window` receives posted beyond
those it consumed, in the order of the sender's program (an instruction sends to the nearest stage first).
A window counts instructions: where one sends several values, the transport posts a receive for each.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence

from ..compression.errors import ScheduleError
from .instruction import Instruction, Op

Edges = Sequence[tuple[int, int]]
Programs = Sequence[Sequence[Instruction]]
Channel = tuple[int, int]
Message = tuple[Instruction, int]  # what one instruction sends to one stage


def verify(programs: Programs, *, num_micro_batches: int, edges: Edges, window: int = 2) -> list[Instruction]:
    """Check the programs of all ranks and return one legal global order, which one process can run.

    Args:
        programs: one list of instructions per rank; U may follow a stage's last B.
        num_micro_batches: micro-batches of a step.
        edges: (source stage, target stage) pairs over which values go forward and their gradients come back.
        window: receives a rank has posted ahead on each channel.
    Raises:
        ScheduleError: an instruction is missing, doubled or misplaced, or the programs wait for each other.
    """
    rank_of = _rank_of_stages(programs, edges)
    _check_instructions(programs, num_micro_batches, rank_of)
    for rank, program in enumerate(programs):
        _check_order(program, rank, num_micro_batches)
    return _Run(programs, edges, rank_of, window).finish()


def smallest_window(programs: Programs, *, num_micro_batches: int, edges: Edges, least: int = 2) -> int:
    """The smallest window from ``least`` up with which ``verify`` accepts the programs.

    Two suffice between neighbours. More are needed by an edge over d ranks once d x (1 + extra_in_flight)
    exceeds four, because that many micro-batches lie between its ends, and by edges that share a channel.
    Raises ScheduleError where no window helps.
    """
    most = max(least, num_micro_batches * len(edges))
    for window in range(least, most):
        try:
            verify(programs, num_micro_batches=num_micro_batches, edges=edges, window=window)
        except _CircularWait:
            continue
        return window
    verify(programs, num_micro_batches=num_micro_batches, edges=edges, window=most)
    return most


class _CircularWait(ScheduleError):
    """Ranks wait for each other; a larger window may help."""


def _rank_of_stages(programs: Programs, edges: Edges) -> list[int]:
    rank_of: dict[int, tuple[int, Instruction]] = {}
    for rank, program in enumerate(programs):
        for instruction in program:
            other, first = rank_of.setdefault(instruction.stage, (rank, instruction))
            if other != rank:
                raise ScheduleError(
                    f"a stage runs on one rank, found {first} on rank {other} and {instruction} on rank "
                    f"{rank}; give stage {instruction.stage} to one of them"
                )
    num_stages = 1 + max((stage for pair in [tuple(rank_of), *edges] for stage in pair), default=-1)
    for stage in range(num_stages):
        if stage not in rank_of:
            raise ScheduleError(f"every stage runs on a rank, {stage}F0 is missing on all {len(programs)}")
    for source, target in edges:
        if not 0 <= source < target:
            raise ScheduleError(
                f"values go to later stages, found an edge from stage {source} to stage {target}"
            )
    return [rank_of[stage][0] for stage in range(num_stages)]


def _check_instructions(programs: Programs, num_micro_batches: int, rank_of: Sequence[int]) -> None:
    if num_micro_batches < 1:
        raise ScheduleError(f"a step needs at least one micro-batch, found micro_batches={num_micro_batches}")
    counts = Counter(instruction for program in programs for instruction in program)
    wanted = {
        Instruction(stage, op, index): rank
        for stage, rank in enumerate(rank_of)
        for op in (Op.F, Op.B)
        for index in range(num_micro_batches)
    }
    for instruction, count in counts.items():
        rank = rank_of[instruction.stage]
        if count > 1:
            raise ScheduleError(
                f"an instruction runs once a step, found {instruction} {count} times on rank {rank}"
            )
        known = instruction.micro_batch is None if instruction.op is Op.U else instruction in wanted
        if not known:
            raise ScheduleError(
                f"the micro-batches of the step are 0 to {num_micro_batches - 1}, found {instruction} on "
                f"rank {rank}"
            )
    for instruction, rank in wanted.items():
        if instruction not in counts:
            raise ScheduleError(
                f"every stage runs F and B of every micro-batch, {instruction} is missing on rank {rank}"
            )


def _check_order(program: Sequence[Instruction], rank: int, num_micro_batches: int) -> None:
    """Within a stage: F ascending, B ascending, no B before its F, U last."""
    last: dict[tuple[int, Op], Instruction] = {}
    for instruction in program:
        stage, op, index = instruction.stage, instruction.op, instruction.micro_batch
        before = last.get((stage, op))
        update = last.get((stage, Op.U))
        if update is not None:
            raise ScheduleError(
                f"the update ends a stage's step, found {instruction} after {update} on rank {rank}"
            )
        if index is None:
            done = last.get((stage, Op.B))
            if done is None or done.micro_batch != num_micro_batches - 1:
                raise ScheduleError(
                    f"a stage updates after its last backward, found {instruction} before "
                    f"{stage}B{num_micro_batches - 1} on rank {rank}"
                )
        elif before is not None and before.micro_batch is not None and before.micro_batch > index:
            raise ScheduleError(
                "a stage takes micro-batches in ascending order (sums of gradients depend on it), found "
                f"{instruction} after {before} on rank {rank}"
            )
        elif op is Op.B:
            forward = last.get((stage, Op.F))
            if forward is None or forward.micro_batch is None or forward.micro_batch < index:
                raise ScheduleError(
                    f"a backward needs its forward first, found {instruction} before {stage}F{index} on rank "
                    f"{rank}"
                )
        last[stage, op] = instruction


class _Run:
    """One run of all programs in which nothing is computed and every wait is counted."""

    def __init__(self, programs: Programs, edges: Edges, rank_of: Sequence[int], window: int):
        self.programs, self.rank_of, self.window = programs, rank_of, window
        self.targets: dict[tuple[int, Op], list[int]] = defaultdict(list)
        self.sources: dict[tuple[int, Op], list[int]] = defaultdict(list)
        for source, target in sorted(set(edges), key=lambda edge: edge[1] - edge[0]):  # nearest stage first
            for sender, receiver, op in ((source, target, Op.F), (target, source, Op.B)):
                self.targets[sender, op].append(receiver)
                self.sources[receiver, op].append(sender)
        self.number: dict[Message, int] = {}  # among the messages of its channel
        lengths: Counter[Channel] = Counter()
        for rank, program in enumerate(programs):
            for instruction in program:
                for channel, message in self.sends(rank, instruction):
                    self.number[message] = lengths[channel]
                    lengths[channel] += 1
        self.consumed: Counter[Channel] = Counter()
        self.arrived: set[Message] = set()
        self.ran: set[Instruction] = set()
        self.order: list[Instruction] = []
        self.place = [0] * len(programs)

    def sends(self, rank: int, instruction: Instruction) -> list[tuple[Channel, Message]]:
        """What leaves the rank after the instruction."""
        targets = self.targets[instruction.stage, instruction.op]
        return [((rank, self.rank_of[t]), (instruction, t)) for t in targets if self.rank_of[t] != rank]

    def receives(self, rank: int, instruction: Instruction) -> list[tuple[Channel, Message]]:
        """What the instruction waits for and does not have yet, its own rank's part included."""
        sources = self.sources[instruction.stage, instruction.op]
        sent = [Instruction(source, instruction.op, instruction.micro_batch) for source in sources]
        messages = [((self.rank_of[i.stage], rank), (i, instruction.stage)) for i in sent]
        return [(channel, message) for channel, message in messages if message not in self.arrived]

    def posted(self, channel: Channel, message: Message) -> bool:
        return self.number[message] < self.consumed[channel] + self.window

    def unposted(self, rank: int, instruction: Instruction) -> list[Channel]:
        """The channels on which the receiver has no receive posted yet for what the instruction sends."""
        return [
            channel for channel, message in self.sends(rank, instruction) if not self.posted(channel, message)
        ]

    def advance(self, rank: int) -> bool:
        """Take what has arrived, then run the rank's next instruction, then leave it: as far as that goes."""
        instruction = self.programs[rank][self.place[rank]]
        before = len(self.arrived), len(self.ran), self.place[rank]
        for channel, message in self.receives(rank, instruction):
            if message[0] in self.ran and (channel[0] == rank or self.posted(channel, message)):
                self.arrived.add(message)
                self.consumed[channel] += 1
        if instruction not in self.ran and not self.receives(rank, instruction):
            self.ran.add(instruction)
            self.order.append(instruction)
        if instruction in self.ran and not self.unposted(rank, instruction):
            self.place[rank] += 1
        return before != (len(self.arrived), len(self.ran), self.place[rank])

    def finish(self) -> list[Instruction]:
        """Run to the end; raises where no rank can go on."""
        while waiting := [
            rank for rank, program in enumerate(self.programs) if self.place[rank] < len(program)
        ]:
            if not any([self.advance(rank) for rank in waiting]):
                reasons = "; ".join(self.reason(rank) for rank in waiting)
                raise _CircularWait(
                    f"the programs wait for each other with {self.window} receives posted ahead: {reasons}"
                )
        return self.order

    def reason(self, rank: int) -> str:
        instruction = self.programs[rank][self.place[rank]]
        if instruction in self.ran:
            receiver = self.unposted(rank, instruction)[0][1]
            return f"rank {rank} cannot send what {instruction} made before rank {receiver} posts a receive"
        return f"rank {rank} needs {self.receives(rank, instruction)[0][1][0]} for {instruction}"
