"""Helpers of the tests of schedules: stages on ranks, edges, and the count of what is in flight."""

from penstock.pipeline.schedules import schedule_named
from penstock.pipeline.schedules.building_blocks import placement, stages_on
from penstock.pipeline.schedules.instruction import Flow, Instruction, Op, parse_program
from penstock.pipeline.schedules.messages import Message, StepMessages
from penstock.pipeline.schedules.simulate import outline, simulate

PER_RANK = {"interleaved": 2, "zbv": 2, "dualpipev": 2}


def laid(schedule, num_ranks, per_rank=None):
    """The stages of each rank as the schedule lays them."""
    rank_of = placement(schedule, stages=num_ranks * (per_rank or PER_RANK.get(schedule, 1)), ranks=num_ranks)
    return stages_on(rank_of)


def neighbours(num_stages):
    return [(stage, stage + 1) for stage in range(num_stages - 1)]


def halved(programs):
    """Every B as I, then W."""
    return [
        [
            half
            for each in program
            for half in (
                [Instruction(each.stage, op, each.micro_batch) for op in (Op.I, Op.W)]
                if each.op is Op.B
                else [each]
            )
        ]
        for program in programs
    ]


def most_in_flight(program, stages):
    """The most micro-batches, summed over these stages, between F and B (or W)."""
    now, most = 0, 0
    for instruction in program:
        if instruction.stage in stages:
            now += {Op.F: 1, Op.B: -1, Op.W: -1}.get(instruction.op, 0)
        most = max(most, now)
    return most


def two_ranks(num_micro_batches, schedule="1f1b", extra_in_flight=0):
    """Two stages that pass one value per micro-batch down and its gradient up."""
    programs = schedule_named(schedule)([[0], [1]], num_micro_batches, extra_in_flight=extra_in_flight)
    receives, sends = {}, {}
    for m in range(num_micro_batches):
        down = Message(Op.F, m, 0, 0, 1, ranks=(0, 1), flow=Flow("v", "F", 0, 1))
        up = Message(Op.B, m, 0, 1, 0, ranks=(1, 0), flow=Flow("v", "B", 1, 0), answers=down)
        sends[Instruction(0, Op.F, m)] = receives[Instruction(1, Op.F, m)] = (down,)
        sends[Instruction(1, Op.B, m)] = receives[Instruction(0, Op.B, m)] = (up,)
    return StepMessages(programs=programs, receives=receives, sends=sends)


def on_paper(*lines, transfer=0.0, **seconds):
    """The programs of a step, one line for each rank; F, I and W take 1 and B 2 unless said otherwise."""
    table = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, "U": 0.0} | seconds
    made = outline([parse_program(line) for line in lines])
    return simulate(made, work=lambda i: table[i.op.value], transfer=lambda message: transfer)
