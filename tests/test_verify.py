import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.compression.errors import ScheduleError
from penstock.pipeline.instruction import parse, parse_program, show
from penstock.pipeline.schedules import SCHEDULES
from penstock.pipeline.schedules.gpipe import gpipe
from penstock.pipeline.schedules.one_f_one_b import one_f_one_b
from penstock.pipeline.verify import smallest_window, verify

SKIPS = ((0, 2), (0, 3), (1, 3))


def neighbours(num_stages):
    return [(stage, stage + 1) for stage in range(num_stages - 1)]


def with_skips(num_stages):
    return neighbours(num_stages) + [edge for edge in SKIPS if edge[1] < num_stages]


def units(num_stages):
    """Every way to give neighbouring stages to one or more ranks."""
    for ends in itertools.product([False, True], repeat=num_stages - 1):
        stages_of_rank = [[0]]
        for stage, cut in enumerate(ends, start=1):
            if cut:
                stages_of_rank.append([stage])
            else:
                stages_of_rank[-1].append(stage)
        yield stages_of_rank


def is_legal(order, programs, num_micro_batches, edges):
    """The law without channels: every rank's program in its order, every frame sent before it is used."""
    assert len(order) == len(set(order)) == sum(map(len, programs))
    at = {str(instruction): place for place, instruction in enumerate(order)}
    for program in programs:
        assert [at[str(i)] for i in program] == sorted(at[str(i)] for i in program)
    for index in range(num_micro_batches):
        for source, target in edges:
            assert at[f"{source}F{index}"] < at[f"{target}F{index}"]
            assert at[f"{target}B{index}"] < at[f"{source}B{index}"]
            assert at[f"{target}F{index}"] < at[f"{target}B{index}"]
    return True


@pytest.mark.parametrize("num_stages", range(1, 7))
@pytest.mark.parametrize(("name", "extra"), [("gpipe", 0), ("1f1b", 0), ("1f1b", 1), ("1f1b", 2)])
def test_every_schedule_is_legal_between_neighbours(name, extra, num_stages):
    for stages_of_rank in units(num_stages):
        for num_micro_batches in range(1, 10):
            programs = SCHEDULES[name](stages_of_rank, num_micro_batches, extra_in_flight=extra)
            edges = neighbours(num_stages)
            order = verify(programs, num_micro_batches=num_micro_batches, edges=edges)
            assert is_legal(order, programs, num_micro_batches, edges)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.integers(1, 6).flatmap(lambda num: st.sampled_from(list(units(num)))),
    st.sampled_from([("gpipe", 0), ("1f1b", 0), ("1f1b", 1), ("1f1b", 2)]),
    st.integers(1, 9),
)
def test_every_schedule_is_legal_with_skips_and_the_window_they_need(
    stages_of_rank, schedule, num_micro_batches
):
    edges = with_skips(1 + stages_of_rank[-1][-1])
    programs = SCHEDULES[schedule[0]](stages_of_rank, num_micro_batches, extra_in_flight=schedule[1])
    window = smallest_window(programs, num_micro_batches=num_micro_batches, edges=edges)
    order = verify(programs, num_micro_batches=num_micro_batches, edges=edges, window=window)
    assert is_legal(order, programs, num_micro_batches, edges)
    if schedule[1] == 0 and all(len(stages) == 1 for stages in stages_of_rank):
        assert window == 2  # one stage a rank and nothing extra in flight: two suffice over these skips


def test_the_order_is_one_that_a_single_process_can_run():
    programs = one_f_one_b([[0], [1]], 3)
    order = verify(programs, num_micro_batches=3, edges=[(0, 1)])
    assert show(order) == "0F0 1F0 0F1 1B0 0B0 1F1 0F2 1B1 0B1 1F2 1B2 0B2"


def test_a_skip_over_three_ranks_needs_a_window_of_its_own():
    stages = [[0], [1], [2], [3]]
    assert smallest_window(one_f_one_b(stages, 9), num_micro_batches=9, edges=with_skips(4)) == 2
    eager = one_f_one_b(stages, 9, extra_in_flight=1)
    assert smallest_window(eager, num_micro_batches=9, edges=with_skips(4)) == 3
    with pytest.raises(
        ScheduleError, match="with 2 receives posted ahead: rank 0 cannot send what 0F5 made before rank 3"
    ):
        verify(eager, num_micro_batches=9, edges=with_skips(4))


def test_no_window_helps_a_circle():
    programs = [parse_program("0B0 0F0"), parse_program("1F0 1B0")]
    with pytest.raises(ScheduleError, match="0B0 before 0F0"):
        smallest_window(programs, num_micro_batches=1, edges=[(0, 1)])
    programs = [parse_program("0F0 0B0 0F1 0B1"), parse_program("1F0 1F1 1B0 1B1")]
    with pytest.raises(ScheduleError, match="wait for each other"):
        smallest_window(programs, num_micro_batches=2, edges=[(0, 1)])


def test_updates_may_end_the_step_of_their_stage():
    programs = [parse_program("0F0 1F0 1B0 1U 0B0 0U"), parse_program("2F0 2B0 2U")]
    assert parse("1U") in verify(programs, num_micro_batches=1, edges=neighbours(3))


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        (["0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1"], "ascending order .* found 0B0 after 0B1 on rank 0"),
        (["0F1 0F0 0B0 0B1", "1F0 1B0 1F1 1B1"], "ascending order .* found 0F0 after 0F1 on rank 0"),
        (["0F0 0F1 0B0", "1F0 1B0 1F1 1B1"], "0B1 is missing on rank 0"),
        (["0F0 0F1 0B0 0B1", "1F0 1B0 1B1"], "1F1 is missing on rank 1"),
        (["0F0 0F1 0B0 0B1", "1F0 1B0 1B1 1F1"], "found 1B1 before 1F1 on rank 1"),
        (["0F0 0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], "once a step, found 0F0 2 times on rank 0"),
        (["0F0 0F1 0B0 0B1 0B1", "1F0 1B0 1F1 1B1"], "once a step, found 0B1 2 times on rank 0"),
        (["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 0F2"], "found 0F0 on rank 0 and 0F2 on rank 1; give stage 0"),
        (["0F0 0F1 0B0", "1F0 1B0 1F1 1B1 0B1"], "found 0F0 on rank 0 and 0B1 on rank 1; give stage 0"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], "rank 0 needs 1B0 for 0B0; rank 1 needs 0F1 for 1F1"),
        (["0F0 0F1 0B0 0B1 0F2", "1F0 1B0 1F1 1B1"], "are 0 to 1, found 0F2 on rank 0"),
        (["0F0 0F1 0B0 0B1", ""], "1F0 is missing on all 2"),
        (["0F0 0F1 0B0 0U 0B1", "1F0 1B0 1F1 1B1"], "found 0U before 0B1 on rank 0"),
        (["0F0 0F1 0B0 0B1 0U 0U", "1F0 1B0 1F1 1B1"], "found 0U 2 times on rank 0"),
        (["0U 0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], "found 0U before 0B1 on rank 0"),
    ],
)
def test_a_broken_program_is_refused_with_the_instruction(written, sentence):
    with pytest.raises(ScheduleError, match=sentence) as error:
        verify([parse_program(text) for text in written], num_micro_batches=2, edges=[(0, 1)])
    assert "\n" not in str(error.value)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data(), st.integers(2, 4), st.integers(2, 5), st.integers(0, 1))
def test_dropping_or_doubling_any_instruction_is_refused(data, num_stages, num_micro_batches, extra):
    programs = one_f_one_b([[stage] for stage in range(num_stages)], num_micro_batches, extra_in_flight=extra)
    program = data.draw(st.sampled_from(programs))
    place = data.draw(st.integers(0, len(program) - 1))
    if data.draw(st.booleans()):
        instruction = program.pop(place)
    else:
        instruction = program[place]
        program.insert(data.draw(st.integers(0, len(program))), instruction)
    with pytest.raises(ScheduleError, match=str(instruction)):
        verify(programs, num_micro_batches=num_micro_batches, edges=neighbours(num_stages))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data(), st.integers(2, 4), st.integers(1, 4))
def test_any_shuffle_is_refused_or_runs_in_a_legal_order(data, num_stages, num_micro_batches):
    edges = neighbours(num_stages)
    programs = one_f_one_b([[stage] for stage in range(num_stages)], num_micro_batches)
    shuffled = [data.draw(st.permutations(program)) for program in programs]
    try:
        order = verify(shuffled, num_micro_batches=num_micro_batches, edges=edges)
    except ScheduleError:
        return
    assert is_legal(order, shuffled, num_micro_batches, edges)


@pytest.mark.parametrize(
    ("edges", "sentence"),
    [([(1, 0)], "from stage 1 to stage 0"), ([(0, 0)], "from stage 0 to stage 0"), ([(0, 7)], "2F0")],
)
def test_an_edge_goes_to_a_later_stage_that_exists(edges, sentence):
    with pytest.raises(ScheduleError, match=sentence):
        verify(one_f_one_b([[0], [1]], 2), num_micro_batches=2, edges=edges)


def test_an_instruction_sends_to_the_nearest_stage_first():
    edges = [(0, 3), (1, 3), (2, 3)]
    for programs in (gpipe([[0, 1, 2], [3]], 1), gpipe([[0], [1, 2, 3]], 1)):
        assert smallest_window(programs, num_micro_batches=1, edges=[*edges, (0, 1), (0, 2), (1, 2)]) == 2


def test_several_stages_and_edges_between_two_ranks_share_one_channel():
    edges = [(0, 5), (1, 4), (2, 3), (0, 1), (1, 2), (3, 4), (4, 5)]
    programs = one_f_one_b([[0, 1, 2], [3, 4, 5]], 4)
    with pytest.raises(ScheduleError, match="rank 1 needs 2F0 for 3F0"):
        verify(programs, num_micro_batches=4, edges=edges)
    assert smallest_window(programs, num_micro_batches=4, edges=edges) == 3
