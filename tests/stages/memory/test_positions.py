"""Timeline: when what a forward saved is read, in layers of the program."""

from penstock.pipeline.schedules.instruction import Op
from penstock.pipeline.schedules.one_f_one_b import one_f_one_b
from penstock.stages.memory.timeline import NEVER, Pass, Timeline

# Two stages of 3 and 2 layers: F of stage 0, F of stage 1, B of stage 1, B of stage 0.
PROGRAM = [Pass(0, 0), Pass(1, 0), Pass(1, 0, reads=True), Pass(0, 0, reads=True), Pass(1, None)]


def test_positions_count_the_layers_of_every_pass():
    line = Timeline(PROGRAM, {0: 3, 1: 2})
    assert [line.start(number) for number in range(5)] == [0, 3, 5, 7, 10]
    assert [line.position(0, 0, layer, reads=False) for layer in range(3)] == [0, 1, 2]
    assert [line.position(7, 0, layer, reads=True) for layer in range(3)] == [9, 8, 7]


def test_a_pass_that_runs_still_reads():
    line = Timeline(PROGRAM, {0: 3, 1: 2})
    for now, found in (0, [5, 7]), (6, [5, 7]), (7, [7]), (9, [7]), (10, []):
        assert [start for start, _ in line.readings(now)] == found


def test_what_no_pass_of_the_program_reads_is_never_read():
    line = Timeline(PROGRAM, {0: 3, 1: 2})
    assert line.next_reading(0, 0, 0) == 7
    assert line.next_reading(0, 0, 10) == NEVER
    assert line.next_reading(0, 1, 0) == NEVER
    assert Timeline().next_reading(0, 0, 0) == NEVER


def test_every_backward_of_a_schedule_comes_behind_its_forward():
    for program in one_f_one_b([[0], [1]], 4):
        passes = [Pass(i.stage, i.micro_batch, i.op in (Op.B, Op.I, Op.W)) for i in program]
        line = Timeline(passes, {0: 5, 1: 4})
        for number, one in enumerate(passes):
            if one.reads or one.micro_batch is None:
                continue
            start = line.next_reading(one.stage, one.micro_batch, line.start(number))
            back = passes.index(Pass(one.stage, one.micro_batch, reads=True))
            assert start == line.start(back) > line.start(number)
