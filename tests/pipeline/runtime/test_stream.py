"""The endless program: slices that end together, in an order that no stage and no channel can break."""

import itertools

import pytest

from penstock.pipeline.schedules.async_1f1b import StreamState, async_1f1b, between
from penstock.pipeline.schedules.instruction import Instruction, Op, show


def fed(num_stages, sizes, *, each=True):
    return StreamState(num_stages=num_stages, each=each, ends=tuple(itertools.accumulate(sizes)))


def test_one_update_a_batch_waits_for_all_stages():
    two = fed(3, [3, 3], each=False)
    assert [show(between([stage], two)) for stage in range(3)] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0U 0F5 0B3 0B4 0B5 0U",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1U 1B3 1F5 1B4 1B5 1U",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2U 2F4 2B4 2F5 2B5 2U",
    ]


@pytest.mark.parametrize("stages", [[[0]], [[0], [1], [2]], [[0, 1], [2, 3]]])
def test_the_whole_is_the_schedule_of_that_name(stages):
    now = fed(1 + stages[-1][-1], [7])
    assert [between(own, now) for own in stages] == async_1f1b(stages, 7)


@pytest.mark.parametrize("each", [True, False])
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1], [5], [3, 3, 3], [4, 7, 5]])
@pytest.mark.parametrize(
    "stages", [[[0]], [[0], [1]], [[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0], [1, 2, 3]]]
)
def test_slices_are_the_whole_program_and_need_nothing_of_later_ones(stages, sizes, each):
    num_stages = 1 + stages[-1][-1]
    ends = [0, *(2 * number for number in itertools.accumulate(sizes)), None]
    done: set[Instruction] = set()
    together = [[] for _ in stages]
    for index, (start, end) in enumerate(itertools.pairwise(ends)):
        now = fed(num_stages, sizes[: index + 1], each=each)
        slices = [between(own, now, start=start, stop=end) for own in stages]
        here = {instruction for program in slices for instruction in program}
        for instruction in here:
            assert needs(instruction, num_stages) <= done | here
        done |= here
        for program, part in zip(together, slices, strict=True):
            program += part
    everything = fed(num_stages, sizes, each=each)
    assert together == [between(own, everything) for own in stages]


def needs(instruction, num_stages):
    """Instructions that must have run before, on other stages and on its own."""
    stage, op, m = instruction.stage, instruction.op, instruction.micro_batch
    if op is Op.F:
        return {Instruction(stage - 1, Op.F, m)} if stage else set()
    if op is Op.B:
        below = {Instruction(stage + 1, Op.B, m)} if stage + 1 < num_stages else set()
        return below | {Instruction(stage, Op.F, m)}
    return set()


@pytest.mark.parametrize("each", [True, False])
def test_a_long_stream_forgets_the_batches_behind_it(each):
    now, all_of_them, clock = fed(4, [], each=each), [], 0
    for size in [4, 5, 7] * 20:
        now = now.followed(size, clock=clock)
        all_of_them.append(size)
        everything = fed(4, all_of_them, each=each)
        for stages in ([0], [1, 2], [3]):
            expected = between(stages, everything, start=clock, stop=2 * everything.number)
            assert between(stages, now, start=clock, stop=2 * now.number) == expected
        assert len(now.ends) <= 3
        clock = 2 * now.number
