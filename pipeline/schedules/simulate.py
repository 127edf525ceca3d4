"""Simulation of a step: its programs in a dry run, with seconds for each instruction and each message.

The same instruction lists that run are simulated, so overlap, waiting and what is in flight are not estimated
by a formula: they come out."""

import dataclasses
from collections.abc import Callable, Iterator
from operator import itemgetter

from ...compression.errors import ScheduleError
from ...stages.plan.plan import Plan
from .instruction import Instruction, Op, Programs, Span
from .messages import Message, StepMessages
from .replicated import step_programs

EXCHANGE_RATE = 1e9  # bytes per second that are copied, or passed on one machine: seen of 44 MB between two
MORE = 1.02  # by which more in flight has to shorten a step, as it takes memory
_FLOAT = 4  # bytes of a parameter: a plan knows their number

Work = Callable[[Instruction], float]
Transfer = Callable[[Message], float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """A simulated step: the spans of every instruction, rank by rank."""

    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """From the first instruction to the last."""
        return max((span.end for span in self.spans), default=0.0)


def simulate(traffic: StepMessages, *, work: Work, transfer: Transfer) -> Simulation:
    """Simulate a step: seconds of ``work`` are those of an instruction with its packing, of ``transfer``
    those in which a message occupies its link, which carries one at a time in each direction, in the order of
    sending. Raises ScheduleError where the programs wait for each other."""
    spans = [
        Span(rank, i.stage, i.op.value, i.micro_batch, free, start - free, end)
        for rank, i, free, start, end in sorted(_run(traffic, work, transfer), key=itemgetter(0))
    ]
    return Simulation(spans=tuple(spans))


def step_seconds(traffic: StepMessages, *, work: Work, transfer: Transfer) -> float:
    """The seconds of ``simulate`` and nothing else, for a search that asks for thousands of steps."""
    return max((end for *_, end in _run(traffic, work, transfer)), default=0.0)


def simulate_plan(plan: Plan, programs: Programs) -> Simulation:
    """Simulate what a plan predicts: tensors pass its link, as frames if codecs were tried, an update begins
    with the exchange of gradients between replicas. I and W take half of a backward each."""

    def seconds(instruction: Instruction) -> float:
        stage, op = plan.stages[instruction.stage], instruction.op
        if op is Op.U:
            return seconds_of_update(plan, instruction.stage)
        seconds = stage.forward_seconds if op is Op.F else stage.backward_seconds / (1 if op is Op.B else 2)
        return seconds + (0.0 if op is Op.W else packing_seconds(plan, instruction.stage, op))

    def transfer(message: Message) -> float:
        cut = plan.stages[min(message.source, message.target)]
        way = "forward" if message.op is Op.F else "backward"
        return cut.transfer_seconds(way, plan.rate(*message.ranks))

    if all(instruction.op is not Op.U for program in programs for instruction in program):
        takes = [n > 1 or s.update_seconds > 0 for n, s in zip(plan.replicas, plan.stages, strict=True)]
        updates = [[Instruction(s, Op.U) for s in own if takes[s]] for own in plan.stages_of_rank]
        programs = [[*program, *more] for program, more in zip(programs, updates, strict=True)]
    return simulate(outline(programs), work=seconds, transfer=transfer)


def simulate_step(plan: Plan) -> tuple[Programs, Simulation]:
    """Return the programs of a step that is no part of a stream, and what is simulated of them: with the more
    micro-batches in flight that a plan leaves open, if they shorten it."""
    numbers = sorted({plan.extra_in_flight, plan.most_extra_in_flight})
    both = [step_programs(plan, extra_in_flight=number) for number in numbers]
    steps = [(programs, simulate_plan(plan, programs)) for programs in both]
    return steps[-1] if steps[0][1].seconds > MORE * steps[-1][1].seconds else steps[0]


def packing_seconds(plan: Plan, stage: int, op: Op) -> float:
    """Seconds of a stage for the frames of a micro-batch: half of the packing and unpacking at either end."""
    way, seconds = "packing_forward" if op is Op.F else "packing_backward", 0.0
    for cut in (stage - 1, stage):
        if 0 <= cut < plan.num_stages - 1 and plan.owner(cut) != plan.owner(cut + 1):
            seconds += getattr(plan.stages[cut], way) / 2
    return seconds


def seconds_of_update(plan: Plan, stage: int) -> float:
    """Seconds in which a rank updates a stage, and its replicas exchange gradients ahead of that."""
    shared = plan.replicas[stage] if plan.sharded and plan.owners == "spread" else 1
    return exchange_seconds(plan, stage) + plan.stages[stage].update_seconds / shared


def exchange_seconds(plan: Plan, stage: int) -> float:
    """Seconds in which replicas of a stage sum up their gradients, which are copied to a buffer and back.

    A sum passes each rank's link as a ring does it; an exact one micro-batch by micro-batch."""
    replicas, size = plan.replicas[stage], _FLOAT * plan.stages[stage].num_parameters
    if replicas == 1:
        return 0.0
    rounds = plan.micro_batches + 1 if plan.exact else 2
    rate = min(EXCHANGE_RATE, plan.link / 8 if plan.link else EXCHANGE_RATE)
    return 2 * size / EXCHANGE_RATE + rounds * size * (replicas - 1) / replicas / rate


def outline(programs: Programs) -> StepMessages:
    """Attach one message per stage and micro-batch to its sender and receiver: F to the next stage's F, B (or
    I) to the previous stage's. What no program sends, in a part of a stream, was there before it began."""
    rank_of = {i[::2]: rank for rank, program in enumerate(programs) for i in program}
    known = {i for program in programs for i in program}
    receives: dict[Instruction, tuple[Message, ...]] = {}
    sends: dict[Instruction, tuple[Message, ...]] = {}
    for sender in known:
        if sender.op not in (Op.F, Op.B, Op.I) or sender.micro_batch is None:
            continue
        way, target, ops = Op.F, sender.stage + 1, (Op.F,)
        if sender.op is not Op.F:
            way, target, ops = Op.B, sender.stage - 1, (Op.B, Op.I)
        heirs = (Instruction(target, op, sender.micro_batch) for op in ops)
        if heir := next((heir for heir in heirs if heir in known), None):
            ranks = rank_of[sender[::2]], rank_of[heir[::2]]
            message = Message(way, sender.micro_batch, 0, sender.stage, target, ranks=ranks)
            sends[sender], receives[heir] = (message,), (message,)
    return StepMessages(programs=programs, receives=receives, sends=sends)


def _run(
    traffic: StepMessages, work: Work, transfer: Transfer
) -> Iterator[tuple[int, Instruction, float, float, float]]:
    """Yield every instruction as soon as its inputs are there, each rank in its order: the rank, when it was
    free, and from when until when it ran."""
    arrived: dict[Message, float] = {}
    link_free: dict[tuple[int, int], float] = {}
    clock, place = [0.0] * len(traffic.programs), [0] * len(traffic.programs)
    moved, stuck = True, dict[int, Instruction]()
    while moved:
        moved = False
        for rank, program in enumerate(traffic.programs):
            while place[rank] < len(program):
                instruction = program[place[rank]]
                needed = traffic.receives.get(instruction, ())
                if any(message not in arrived for message in needed):
                    break
                free, start = clock[rank], max(clock[rank], *(arrived[message] for message in needed), 0.0)
                clock[rank] = end = start + work(instruction)
                for message in traffic.sends.get(instruction, ()):
                    arrived[message], link = end, message.ranks
                    if link[0] != link[1]:
                        link_free[link] = max(end, link_free.get(link, 0.0)) + transfer(message)
                        arrived[message] = link_free[link]
                yield rank, instruction, free, start, end
                place[rank] += 1
                moved = True
        places = () if moved else enumerate(zip(traffic.programs, place, strict=True))
        stuck = {rank: program[n] for rank, (program, n) in places if n < len(program)}
        if stuck:  # in a slice of a stream, frames of earlier slices arrived before it began
            sent = {message for messages in traffic.sends.values() for message in messages}
            early = {message for messages in traffic.receives.values() for message in messages} - sent
            moved = not early <= arrived.keys()
            arrived |= dict.fromkeys(early - arrived.keys(), 0.0)
    if stuck:
        found = ", ".join(f"rank {rank} at {instruction}" for rank, instruction in stuck.items())
        raise ScheduleError(f"programs must not wait for each other, found {found}; reorder them")
