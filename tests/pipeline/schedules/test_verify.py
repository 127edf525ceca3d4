"""Instructions and programs as text and as CSV, and which orders of them are legal."""

import itertools

import pytest
from executor import Channels, obeys
from hypothesis import given
from hypothesis import strategies as st
from programs import laid, neighbours

from penstock.compression.errors import ScheduleError
from penstock.pipeline.schedules import SCHEDULES
from penstock.pipeline.schedules.custom import load_program, parse_csv, parse_programs
from penstock.pipeline.schedules.instruction import Instruction, Op, parse, parse_program, show
from penstock.pipeline.schedules.synchronous import gpipe, one_f_one_b
from penstock.pipeline.schedules.verify import smallest_window, verify

SKIPS = ((0, 2), (0, 3), (1, 3))
NAMES = [name for name in SCHEDULES if name != "custom"]
UNITS = [("gpipe", 0), ("1f1b", 0), ("1f1b", 1), ("1f1b", 2), ("zb_h1", 0), ("zb_h1", 1), ("async_1f1b", 0)]


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
    for program in programs:
        stages = {each.stage for each in program}
        assert [each for each in order if each.stage in stages] == list(program)
    assert len(order) == sum(map(len, programs))
    at = {str(instruction).replace("I", "B"): place for place, instruction in enumerate(order)}
    for index in range(num_micro_batches):
        for source, target in edges:
            assert at[f"{source}F{index}"] < at[f"{target}F{index}"]
            assert at[f"{target}B{index}"] < at[f"{source}B{index}"]
            assert at[f"{target}F{index}"] < at[f"{target}B{index}"]
    return True


@given(st.integers(1, 6).flatmap(lambda num: st.sampled_from(list(units(num)))), st.integers(1, 9))
def test_every_schedule_is_legal_and_with_skips_in_the_window_they_need(stages_of_rank, number):
    num_stages = 1 + stages_of_rank[-1][-1]
    for name, extra in UNITS:
        programs = SCHEDULES[name](stages_of_rank, number, extra_in_flight=extra)
        given = {"num_micro_batches": number, "asynchronous": name == "async_1f1b"}
        edges = neighbours(num_stages)
        assert is_legal(verify(programs, edges=edges, **given), programs, number, edges)
        edges = with_skips(num_stages)
        window = smallest_window(programs, edges=edges, **given)
        assert is_legal(verify(programs, edges=edges, window=window, **given), programs, number, edges)
        if extra == 0 and all(len(stages) == 1 for stages in stages_of_rank):
            assert window == 2  # one stage a rank and nothing extra in flight: two suffice over these skips


@pytest.mark.parametrize(
    "num_ranks", [1, 2, 3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in range(5, 9))]
)
@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_runs_on_any_number_of_ranks(name, num_ranks):
    asynchronous = name == "async_1f1b"
    stages_of_rank = laid(name, num_ranks)
    num_stages = sum(map(len, stages_of_rank))
    edges = neighbours(num_stages)
    skips = sorted({*with_skips(num_stages), *([(0, num_stages - 1)] if num_stages > 1 else [])})
    for number in (*range(1, 10), 13, 16, 17, 20):  # below, at and above what fills 4, 5 and 8 ranks twice
        programs = SCHEDULES[name](stages_of_rank, number)
        given = {"num_micro_batches": number, "asynchronous": asynchronous}
        window = smallest_window(programs, edges=edges, **given) if name == "interleaved" else 2
        order = verify(programs, edges=edges, window=window, **given)
        if number in (1, 2, 5, 9, 20):
            assert is_legal(order, programs, number, edges)
            smallest_window(programs, edges=skips, **given)


def test_a_skip_over_three_ranks_needs_a_window_of_its_own():
    stages = [[0], [1], [2], [3]]
    assert smallest_window(one_f_one_b(stages, 9), num_micro_batches=9, edges=with_skips(4)) == 2
    eager = one_f_one_b(stages, 9, extra_in_flight=1)
    assert smallest_window(eager, num_micro_batches=9, edges=with_skips(4)) == 3
    with pytest.raises(ScheduleError, match=r"2 receives .* rank 0 cannot send what 0F5 made before rank 3"):
        verify(eager, num_micro_batches=9, edges=with_skips(4))


def test_no_window_helps_a_circle():
    programs = [parse_program("0B0 0F0"), parse_program("1F0 1B0")]
    with pytest.raises(ScheduleError, match="0B0 before 0F0"):
        smallest_window(programs, num_micro_batches=1, edges=[(0, 1)])
    programs = [parse_program("0F0 0B0 0F1 0B1"), parse_program("1F0 1F1 1B0 1B1")]
    with pytest.raises(ScheduleError, match="wait for each other"):
        smallest_window(programs, num_micro_batches=2, edges=[(0, 1)])


def test_an_update_follows_every_backward_of_an_asynchronous_stage():
    programs = [parse_program("0F0 1F0 0F1 1B0 1U 0B0 0U 1F1 1I1 1W1 1U 0B1 0U")]
    order = verify(programs, num_micro_batches=2, edges=[(0, 1)], asynchronous=True)
    assert order == programs[0]


@pytest.mark.parametrize(
    ("text", "subject"),
    [
        ("0F0 0B0 0F1 0B1 0U", "right after each backward, .* 0F1 after 0B0 on rank 0"),
        ("0F0 0B0 0U 0F1 0B1", "nothing after 0B1"),
        ("0F0 0F1 0B0 0U 0U 0B1", "0U after 0U"),
        ("0F0 0B0 0F1 0U 0B1 0U", "0F1 after 0B0"),
        ("0U 0F0 0B0 0U 0F1 0B1 0U", "0U after nothing"),
        ("0F0 0I0 0U 0F1 0W0 0U 0B1 0U", "0U after 0I0"),
        ("0F0 0F0 0B0 0U 0F1 0B1 0U", "once a step, found 0F0 2 times"),
    ],
)
def test_a_misplaced_update_of_an_asynchronous_stage_is_refused(text, subject):
    with pytest.raises(ScheduleError, match=subject):
        verify([parse_program(text)], num_micro_batches=2, edges=[], asynchronous=True)


@pytest.mark.parametrize(
    ("written", "subject"),
    [
        (["0F0 0F1 0B1 0B0", "1F0 1B0 1F1 1B1"], "ascending order .* found 0B0 after 0B1 on rank 0"),
        (["0F0 0F1 0B0", "1F0 1B0 1F1 1B1"], "0B1 is missing on rank 0"),
        (["0F0 0F1 0B0 0B1", "1F0 1B0 1B1 1F1"], "found 1B1 before 1F1 on rank 1"),
        (["0F0 0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], "once a step, found 0F0 2 times on rank 0"),
        (["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1 0F2"], "found 0F0 on rank 0 and 0F2 on rank 1; give stage 0"),
        (["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"], "rank 0 needs 1B0 for 0B0; rank 1 needs 0F1 for 1F1"),
        (["0F0 0F1 0B0 0B1 0F2", "1F0 1B0 1F1 1B1"], "are 0 to 1, found 0F2 on rank 0"),
        (["0F0 0F1 0B0 0B1", ""], "1F0 is missing on all 2"),
        (["0F0 0F1 0B0 0U 0B1", "1F0 1B0 1F1 1B1"], "found 0U before 0B1 on rank 0"),
        (["0F0 0F1 0B0 0B1 0U 0U", "1F0 1B0 1F1 1B1"], "found 0U 2 times on rank 0"),
        (["0F0 0F1 0B0 0B1 0I1", "1F0 1B0 1F1 1B1"], "is used once, .* found 0B1 and 0I1 on rank 0; drop"),
        (["0F0 0F1 0B0 0I1", "1F0 1B0 1F1 1B1"], "0W1 is missing on rank 0"),
        (["0F0 0F1 0B0 0W1", "1F0 1B0 1F1 1B1"], "0I1 is missing on rank 0"),
        (["0F0 0F1 0B0 0W1 0I1", "1F0 1B0 1F1 1B1"], "W needs its I first, found 0W1 before 0I1 on rank 0"),
        (["0F0 0F1 0I0 0I1 0W1 0W0", "1F0 1B0 1F1 1B1"], "ascending .* found 0W0 after 0W1 on rank 0"),
        (["0F0 0F1 0I1 0W1 0I0 0W0", "1F0 1B0 1F1 1B1"], "ascending .* found 0I0 after 0I1 on rank 0"),
        (["0F0 0F1 0I0 0B1 0W0", "1F0 1B0 1F1 1B1"], "ascending .* found 0W0 after 0B1 on rank 0"),
        (["0I0 0F0 0F1 0W0 0B1", "1F0 1B0 1F1 1B1"], "found 0I0 before 0F0 on rank 0"),
        (["0F0 0I0 0F1 0I1 0W0 0W1", "1F0 1F1 1B0 1B1"], "needs 1B0 for 0I0; rank 1 needs 0F1 for 1F1"),
        (["0F0 0F1 0I0 0I1 0W0 0U 0W1", "1F0 1B0 1F1 1B1"], "found 0U before 0W1 on rank 0"),
    ],
)
def test_a_broken_program_is_refused_with_the_instruction(written, subject):
    with pytest.raises(ScheduleError, match=subject):
        verify([parse_program(text) for text in written], num_micro_batches=2, edges=[(0, 1)])


def accepted(programs, num_micro_batches, edges, *, window=2, asynchronous=False):
    """The verdict of ``verify``, whose every order is a legal one."""
    try:
        given = {"num_micro_batches": num_micro_batches, "edges": edges, "asynchronous": asynchronous}
        order = verify(programs, window=window, **given)
    except ScheduleError:
        return False
    return is_legal(order, programs, num_micro_batches, edges)


def may_run(programs, num_micro_batches, edges, *, window=2, asynchronous=False):
    """The verdict of the twin: the laws of order, and bounded channels."""
    ordered = obeys(programs, num_micro_batches, asynchronous=asynchronous)
    return ordered and Channels(programs, edges, window).runs()


def orders(text):
    """Every order of these instructions."""
    return [list(order) for order in itertools.permutations(parse_program(text))]


@pytest.mark.parametrize("window", [1, 2])
def test_every_order_of_two_stages_gets_the_verdict_of_all_interleavings(window):
    edges, verdicts = [(0, 1)], []
    for programs in itertools.product(orders("0F0 0F1 0B0 0B1"), orders("1F0 1F1 1B0 1B1")):
        lawful_order = obeys(programs, 2)
        outcomes = Channels(programs, edges, window).outcomes() if lawful_order else {False}
        assert outcomes == {accepted(programs, 2, edges, window=window)}
        verdicts.append(True in outcomes)
    assert (len(verdicts), sum(verdicts)) == (576, 3)


@pytest.mark.parametrize(
    "num_micro_batches", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))]
)
@pytest.mark.parametrize("name", NAMES)
def test_two_neighbouring_instructions_swapped_get_the_verdict_of_the_twin(name, num_micro_batches):
    verdicts = set()
    for num_ranks in (1, 2, 3) if len(laid(name, 1)[0]) == 1 else (1, 2):
        stages_of_rank = laid(name, num_ranks)
        edges = neighbours(sum(map(len, stages_of_rank)))
        programs = SCHEDULES[name](stages_of_rank, num_micro_batches)
        asynchronous = name == "async_1f1b"
        if not asynchronous:
            updates = [[parse(f"{stage}U") for stage in stages] for stages in stages_of_rank]
            programs = [[*own, *after] for own, after in zip(programs, updates, strict=True)]
        given = {"edges": edges, "asynchronous": asynchronous, "window": 2}
        assert accepted(programs, num_micro_batches, **given)
        assert may_run(programs, num_micro_batches, **given)
        for rank, program in enumerate(programs):
            for place in range(len(program) - 1):
                swapped = [*program[:place], program[place + 1], program[place], *program[place + 2 :]]
                other = [*programs[:rank], swapped, *programs[rank + 1 :]]
                verdict = may_run(other, num_micro_batches, **given)
                assert accepted(other, num_micro_batches, **given) == verdict, show(swapped)
                verdicts.add(verdict)
    assert False in verdicts


def test_an_edge_goes_to_a_later_stage_that_exists():
    for edge, subject in ((1, 0), "stage 1 to stage 0"), ((0, 0), "stage 0 to stage 0"), ((0, 7), "2F0"):
        with pytest.raises(ScheduleError, match=subject):
            verify(one_f_one_b([[0], [1]], 2), num_micro_batches=2, edges=[edge])


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


numbers = st.integers(0, 10_000)
instructions = st.one_of(
    st.builds(Instruction, numbers, st.sampled_from([Op.F, Op.B, Op.I, Op.W]), numbers),
    st.builds(Instruction, numbers, st.just(Op.U), st.none()),  # of a tuple it would guess the rest
)


@given(st.lists(st.lists(instructions, min_size=1)))
def test_programs_read_back_from_text_and_from_csv(programs):
    assert [parse_program(show(program)) for program in programs] == programs
    assert parse_programs("\n".join(map(show, programs))) == programs
    assert parse_csv("\n".join(",".join(map(str, program)) for program in programs)) == programs


def test_comments_and_empty_lines_are_skipped():
    text = "# first rank\n0F0 0B0  # one micro-batch\n\n   1F0 1B0\r\n"
    assert parse_programs(text) == [parse_program("0F0 0B0"), parse_program("1F0 1B0")]


def test_csv_of_torch_loses_what_the_engine_does_itself():
    text = """
0UNSHARD,3UNSHARD,0F0,0SEND_F0,,0RECV_B0,(0F1;3B0)OVERLAP_F_B,0WAIT_SEND_F0, 3I1 ,3W1,3SEND_B1
1UNSHARD,1RECV_F0,1F0,1SEND_F0,(2F1; 1B0)OVERLAP_F_B,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD,,
"""
    assert [*map(show, parse_csv(text))] == ["0F0 0F1 3B0 3I1 3W1", "1F0 2F1 1B0"]


WORDS = ["", "F3", "1F", "1U3", "1X3", "-1F3", "1F-3", "1f3", "1F3 ", "1F3 1F4", "1F٣", "1F" + "9" * 5000]
CELLS = ["0X1", "0SEND_X1", "(0F1;3B0)OVERLAP", "(0F1;3Q0)OVERLAP_F_B", "SEND_F0", "0F"]


def test_anything_else_is_refused_and_named():
    for word in WORDS:
        with pytest.raises(ScheduleError, match="write it like 1F3 or 1U") as error:
            parse(word)
        assert repr(word) in str(error.value)
    for cell in CELLS:
        with pytest.raises(ScheduleError, match="write it like 1F3 or 1U"):
            parse_csv(f"0F0,{cell}\n")
    with pytest.raises(ScheduleError, match="'0Q1'"):
        parse_program("0F0 0Q1 0B0")
    with pytest.raises(ScheduleError, match="cannot read it: field larger than"):
        parse_csv("0F0," + "x" * 200_000)


def test_a_custom_schedule_loads_from_text_and_from_csv(tmp_path):
    lines = ("0F0 0B0", "1F0 1B0")
    (tmp_path / "own.txt").write_text("# mine\n" + "\n".join(lines))
    (tmp_path / "own.CSV").write_text("0F0,0SEND_F0,0B0\n1F0,1B0\n")
    assert load_program(tmp_path / "own.txt") == load_program(str(tmp_path / "own.CSV")) == lines


@pytest.mark.parametrize(
    ("name", "content", "subject"),
    [
        ("none.csv", None, "cannot be read: No such file"),
        ("bytes.csv", b"\xff\xfe\x00", "cannot be read: it is no text"),
        ("prose.txt", b"all forwards, then all backwards", ".*found 'all'"),
        ("empty.txt", b"# a line for each rank\n\n", "holds no instructions"),
        ("empty.csv", b",,\n", "holds no instructions"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused(tmp_path, name, content, subject):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ScheduleError, match=f"{name}:? {subject}"):
        load_program(tmp_path / name)
