"""Is a schedule legal: the programs of all ranks are checked, and run once without a device.

A step that would deadlock or change a bit is refused before any rank starts, while the reason can be named.
"""

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

from ...compression.errors import ScheduleError
from .instruction import Instruction, Op, Programs

Edges = Sequence[tuple[int, int]]
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
        """Return the messages that the instruction makes for other stages, its own rank's included."""
        stage, way, index = instruction.stage, _WAY.get(instruction.op), instruction.micro_batch
        if way is None or index is None:
            return []
        return [(stage, target, index, way) for target in self.targets[stage, way]]

    def receives(self, instruction: Instruction) -> list[Sent]:
        """Return the messages that the instruction waits for and does not have yet."""
        stage, way, index = instruction.stage, _WAY.get(instruction.op), instruction.micro_batch
        if way is None or index is None:
            return []
        messages = [(source, stage, index, way) for source in self.sources[stage, way]]
        return [message for message in messages if message not in self.arrived]

    def posted(self, message: Sent) -> bool:
        """True if the receiver has posted a receive for it; on one rank nothing is posted."""
        channel = self.channel(message)
        return channel[0] == channel[1] or self.number[message] < self.consumed[channel] + self.window

    def unposted(self, instruction: Instruction) -> list[Sent]:
        """Return the messages of the instruction that no receive is posted for yet."""
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


_INPUTS = (Op.B, Op.I)  # they take the gradient that came from downstream
_WEIGHTS = (Op.B, Op.W)  # they add to the gradients of the weights


def verify(
    programs: Programs,
    *,
    num_micro_batches: int,
    edges: Edges,
    window: int = 2,
    asynchronous: bool = False,
    rank_of: RankOf | None = None,
) -> list[Instruction]:
    """Check the programs of all ranks and return one legal global order, which one process can run.

    A program cannot name a version of the weights, so none can read one that is gone: what a micro-batch sees
    follows from the updates before its F, and a stage keeps that version until the micro-batch's B or W.

    Args:
        programs: one list of instructions per rank; a stage and micro-batch has F, and B or I and W.
        num_micro_batches: micro-batches of a step.
        edges: (source stage, target stage) pairs over which values go forward and their gradients come back.
        window: receives a rank has posted ahead on each channel.
        asynchronous: a stage updates right after each of its backwards; otherwise U may end its step.
        rank_of: who runs a stage for a micro-batch, where stages have replicas; None: one rank runs a stage.
    Raises:
        ScheduleError: an instruction is missing, doubled or misplaced, or the programs wait for each other.
    """
    # 1. Each stage runs somewhere, each instruction once, on the rank that its micro-batch is dealt to.
    _check_edges(edges)
    ranks = _ranks_of_stages(programs, edges, several=rank_of is not None)
    rank_of = rank_of or (lambda stage, micro_batch: ranks[stage][0])
    _check_instructions(programs, num_micro_batches, ranks, rank_of, asynchronous)
    # 2. Each stage takes micro-batches in ascending order, F before B, and updates after its backwards.
    for stage, owners in enumerate(ranks):
        for rank in owners:
            own = [instruction for instruction in programs[rank] if instruction.stage == stage]
            _check_order(own, rank)
            (_check_each_update if asynchronous else _check_last_update)(own, rank)
    # 3. Nobody waits for ever.
    return PaperRun(programs, edges, rank_of, window).finish()


def smallest_window(
    programs: Programs,
    *,
    num_micro_batches: int,
    edges: Edges,
    least: int = 2,
    asynchronous: bool = False,
    rank_of: RankOf | None = None,
) -> int:
    """The smallest window from ``least`` up with which ``verify`` accepts the programs.

    Two suffice between neighbours. More are needed by an edge over d ranks once d x (1 + extra_in_flight)
    exceeds four, because that many micro-batches lie between its ends, and by edges that share a channel, as
    the stages of two ranks in a loop do.
    Raises ScheduleError where no window helps.
    """
    most = max(least, num_micro_batches * len(edges))

    def waits(window: int) -> CircularWait | None:
        settings = {"num_micro_batches": num_micro_batches, "edges": edges, "asynchronous": asynchronous}
        try:
            verify(programs, **settings, window=window, rank_of=rank_of)
        except CircularWait as error:
            return error
        return None

    low, high = least - 1, least  # a window that waits, or none; and one that may not
    while (error := waits(high)) is not None:
        if high == most:
            raise error
        low, high = high, min(most, 2 * high)
    return bisect.bisect_left(range(high), True, lo=low + 1, key=lambda window: waits(window) is None)


def _ranks_of_stages(programs: Programs, edges: Edges, *, several: bool) -> list[list[int]]:
    """The ranks of every stage: one, unless it may have ``several``."""
    rank_of: dict[int, tuple[int, Instruction]] = {}
    ranks: dict[int, list[int]] = {}
    for rank, program in enumerate(programs):
        for instruction in program:
            other, first = rank_of.setdefault(instruction.stage, (rank, instruction))
            if rank not in ranks.setdefault(instruction.stage, []):
                ranks[instruction.stage].append(rank)
            if other != rank and not several:
                raise ScheduleError(
                    f"a stage runs on one rank, found {first} on rank {other} and {instruction} on rank "
                    f"{rank}; give stage {instruction.stage} to one of them"
                )
    num_stages = 1 + max((stage for pair in [tuple(rank_of), *edges] for stage in pair), default=-1)
    for stage in range(num_stages):
        if stage not in rank_of:
            raise ScheduleError(f"every stage runs on a rank, {stage}F0 is missing on all {len(programs)}")
    return [ranks[stage] for stage in range(num_stages)]


def _check_edges(edges: Edges) -> None:
    for source, target in edges:
        if not 0 <= source < target:
            raise ScheduleError(
                f"values go to later stages, found an edge from stage {source} to stage {target}"
            )


def _check_instructions(
    programs: Programs,
    num_micro_batches: int,
    ranks: Sequence[Sequence[int]],
    rank_of: RankOf,
    asynchronous: bool,
) -> None:
    """Check a step's instructions: F once, and B once or I and W once; no more and of no other
    micro-batch.
    """
    if num_micro_batches < 1:
        raise ScheduleError(f"a step needs at least one micro-batch, found micro_batches={num_micro_batches}")
    counts = Counter(instruction for program in programs for instruction in program)
    for instruction, count in counts.items():
        rank, index = ranks[instruction.stage][0], instruction.micro_batch
        if count > 1 and not (asynchronous and instruction.op is Op.U):
            raise ScheduleError(
                f"an instruction runs once a step, found {instruction} {count} times on rank {rank}"
            )
        if (index is None) != (instruction.op is Op.U) or not 0 <= (index or 0) < num_micro_batches:
            raise ScheduleError(
                f"the micro-batches of the step are 0 to {num_micro_batches - 1}, found {instruction} on "
                f"rank {rank}"
            )
    for stage in range(len(ranks)):
        for index in range(num_micro_batches):
            _check_complete(counts, stage, index, rank_of(stage, index))
    for place, program in enumerate(programs):
        for stage, _, index in program:
            if index is not None and (rank := rank_of(stage, index)) != place:
                raise ScheduleError(
                    f"micro-batch {index} of stage {stage} is dealt to rank {rank}, found it on rank {place}"
                )


def _check_complete(counts: Counter[Instruction], stage: int, index: int, rank: int) -> None:
    whole = Instruction(stage, Op.B, index)
    halves = [Instruction(stage, op, index) for op in (Op.I, Op.W)]
    found = [half for half in halves if half in counts]
    if whole in counts and found:
        raise ScheduleError(
            f"a gradient is used once, by B or by I and W, found {whole} and {found[0]} on rank {rank}; "
            "drop one of them"
        )
    wanted = [Instruction(stage, Op.F, index), *(halves if found else [whole])]
    for instruction in wanted:
        if instruction not in counts:
            raise ScheduleError(
                f"every stage runs F and B (or I and W) of every micro-batch, {instruction} is missing on "
                f"rank {rank}"
            )


def _check_order(own: Sequence[Instruction], rank: int) -> None:
    """Of one stage: F, then B or I, then W; each of F, of B and I, and of B and W ascending."""
    for ops in ((Op.F,), _INPUTS, _WEIGHTS):
        same = [(each.micro_batch, each) for each in own if each.op in ops and each.micro_batch is not None]
        for (before, first), (after, second) in pairwise(same):
            if before > after:
                raise ScheduleError(
                    "a stage takes micro-batches in ascending order (sums of gradients depend on it), found "
                    f"{second} after {first} on rank {rank}"
                )
    seen: set[Instruction] = set()
    for instruction in own:
        first = Op.I if instruction.op is Op.W else Op.F
        needed = Instruction(instruction.stage, first, instruction.micro_batch)
        if instruction.op in (Op.B, Op.I, Op.W) and needed not in seen:
            what = "a backward needs its forward" if first is Op.F else "W needs its I"
            raise ScheduleError(f"{what} first, found {instruction} before {needed} on rank {rank}")
        seen.add(instruction)


def _check_last_update(own: Sequence[Instruction], rank: int) -> None:
    """Of one stage of a synchronous step: U, if it is there, comes after the last B or W, so after all."""
    last = [instruction for instruction in own if instruction.op in _WEIGHTS][-1]
    for number, instruction in enumerate(own):
        if instruction.op is Op.U and last in own[number:]:
            raise ScheduleError(
                f"a stage updates after its last backward, found {instruction} before {last} on rank {rank}"
            )


def _check_each_update(own: Sequence[Instruction], rank: int) -> None:
    """Of one stage of an asynchronous program: a U right after every B or W, and none elsewhere."""
    for instruction, following in pairwise([None, *own, None]):
        due = instruction is not None and instruction.op in _WEIGHTS
        comes = following is not None and following.op is Op.U
        if due != comes:
            raise ScheduleError(
                "an asynchronous stage updates right after each backward, and only there, found "
                f"{following or 'nothing'} after {instruction or 'nothing'} on rank {rank}"
            )
