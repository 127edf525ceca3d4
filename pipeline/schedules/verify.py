"""Is a schedule legal: the programs of all ranks are checked, and run once without a device.

A step that would deadlock or change a bit is refused before any rank starts."""

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import chain, pairwise

from ...compression.errors import ScheduleError
from .instruction import Instruction, Op, Programs

Edges = Sequence[tuple[int, int]]
Channel = tuple[int, int]
RankOf = Callable[[int, int], int]  # who runs a stage for a micro-batch
Sent = tuple[int, int, int, Op]  # source stage, target stage, micro-batch, F or B

_WAY = {Op.F: Op.F, Op.B: Op.B, Op.I: Op.B}  # I sends up what B would; W and U pass nothing on


class CircularWait(ScheduleError):
    """Ranks wait for each other; a larger window may help."""


def _dry_run(programs: Programs, edges: Edges, rank_of: RankOf, window: int) -> list[Instruction]:
    """Run all programs with nothing computed and every wait counted; return the order of instructions."""
    # 1. The messages of every instruction, its own rank's included, and the place of each in its channel.
    targets, sources = defaultdict(list), defaultdict(list)
    for source, target in sorted(set(edges), key=lambda edge: edge[1] - edge[0]):  # nearest stage first
        for sender, receiver, way in ((source, target, Op.F), (target, source, Op.B)):
            targets[sender, way].append(receiver)
            sources[receiver, way].append(sender)
    sends: dict[Instruction, list[Sent]] = {}
    needs: dict[Instruction, list[Sent]] = {}
    maker: dict[Sent, Instruction] = {}
    number: dict[Sent, int] = {}
    channel: dict[Sent, Channel] = {}
    lengths, consumed = Counter[Channel](), Counter[Channel]()
    for instruction in chain(*programs):
        stage, op, index = instruction
        way = _WAY.get(op)
        if index is None or way is None:
            sends[instruction] = needs[instruction] = []
            continue
        sends[instruction] = [(stage, target, index, way) for target in targets[stage, way]]
        needs[instruction] = [(source, stage, index, way) for source in sources[stage, way]]
        for message in sends[instruction]:
            maker[message] = instruction
            channel[message] = between = rank_of(stage, index), rank_of(message[1], index)
            number[message] = lengths[between]
            lengths[between] += 1

    def posted(message: Sent) -> bool:
        """True if the receiver has posted a receive for it; on one rank nothing is posted."""
        sender, receiver = channel[message]
        return sender == receiver or number[message] < consumed[sender, receiver] + window

    # 2. Each rank takes what has arrived, runs its next instruction, and leaves it: as far as that goes.
    made, arrived, order = set[Sent](), set[Sent](), list[Instruction]()
    place = [0] * len(programs)
    ran = [False] * len(programs)  # the rank's next instruction, which it has yet to leave
    while waiting := [rank for rank, program in enumerate(programs) if place[rank] < len(program)]:
        before = len(arrived), len(order), sum(place)
        for rank in waiting:
            instruction = programs[rank][place[rank]]
            for message in needs[instruction]:
                if message in made and message not in arrived and posted(message):
                    arrived.add(message)
                    consumed[channel[message]] += 1
            if not ran[rank] and arrived.issuperset(needs[instruction]):
                ran[rank] = True
                made.update(sends[instruction])
                order.append(instruction)
            if ran[rank] and all(map(posted, sends[instruction])):
                ran[rank] = False
                place[rank] += 1
        if before != (len(arrived), len(order), sum(place)):
            continue
        # 3. No rank can go on.
        reasons = []
        for rank in waiting:
            instruction = programs[rank][place[rank]]
            if ran[rank]:
                _, receiver = channel[next(one for one in sends[instruction] if not posted(one))]
                reason = f"cannot send what {instruction} made before rank {receiver} posts a receive"
            else:
                missing = next(one for one in needs[instruction] if one not in arrived)
                reason = f"needs {maker[missing]} for {instruction}"
            reasons.append(f"rank {rank} {reason}")
        raise CircularWait(
            f"the programs wait for each other with {window} receives posted ahead: {'; '.join(reasons)}"
        )
    return order


_INPUTS = (Op.B, Op.I)  # they take the gradient that came from downstream
_WEIGHTS = (Op.B, Op.W)  # they add to the gradients of the weights


def verify(
    programs: Programs, *, num_micro_batches: int, edges: Edges, window: int = 2, asynchronous: bool = False,
    rank_of: RankOf | None = None,
) -> list[Instruction]:  # fmt: skip
    """Check the programs of all ranks and return one legal global order, which one process can run.

    Each stage and micro-batch has F, and B or I and W. A program cannot name a version of the weights, so
    none can read one that is gone.

    Args:
        edges: (source stage, target stage) pairs over which values go forward and their gradients come back.
        window: receives a rank has posted ahead on each channel.
        asynchronous: a stage updates right after each of its backwards; otherwise U may end its step.
        rank_of: who runs a stage for a micro-batch, where stages have replicas; None: one rank runs a
            stage."""
    # 1. Each stage runs somewhere, each instruction once, on the rank that its micro-batch is dealt to.
    if wrong := next((edge for edge in edges if not 0 <= edge[0] < edge[1]), None):
        source, target = wrong
        raise ScheduleError(f"values go to later stages, found an edge from stage {source} to stage {target}")
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
    return _dry_run(programs, edges, rank_of, window)


def smallest_window(
    programs: Programs, *, num_micro_batches: int, edges: Edges, least: int = 2, asynchronous: bool = False,
    rank_of: RankOf | None = None,
) -> int:  # fmt: skip
    """The smallest window from ``least`` up with which ``verify`` accepts the programs; raises where none is.

    Two suffice between neighbours. More are needed by an edge over d ranks once d x (1 + extra_in_flight)
    exceeds four, because that many micro-batches lie between its ends, and by edges that share a channel, as
    the stages of two ranks in a loop do."""
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


def _check_instructions(
    programs: Programs, num_micro_batches: int, ranks: Sequence[Sequence[int]], rank_of: RankOf,
    asynchronous: bool,
) -> None:  # fmt: skip
    """Check a step's instructions: F once, and B once or I and W once; no more, of no other micro-batch."""
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
    for instruction in [Instruction(stage, Op.F, index), *(halves if found else [whole])]:
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
    last = max(number for number, instruction in enumerate(own) if instruction.op in _WEIGHTS)
    for instruction in own[:last]:
        if instruction.op is Op.U:
            raise ScheduleError(
                f"a stage updates after its last backward, found {instruction} before {own[last]} "
                f"on rank {rank}"
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
