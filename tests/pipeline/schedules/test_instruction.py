"""Instructions and programs as text and as CSV: what is written reads back, anything else is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.compression.errors import ScheduleError
from penstock.pipeline.schedules.custom import (
    load_program,
    parse_csv,
    parse_programs,
    show_csv,
    show_programs,
)
from penstock.pipeline.schedules.instruction import Instruction, Op, parse, parse_program, show

numbers = st.integers(0, 10_000)
instructions = st.one_of(
    st.builds(Instruction, numbers, st.sampled_from([Op.F, Op.B, Op.I, Op.W]), numbers),
    st.builds(Instruction, numbers, st.just(Op.U), st.none()),  # of a tuple it would guess the rest
)


def test_an_instruction_is_written_as_stage_op_and_micro_batch():
    written = {
        "1F3": Instruction(1, Op.F, 3),
        "12B0": Instruction(12, Op.B, 0),
        "2I7": Instruction(2, Op.I, 7),
        "2W7": Instruction(2, Op.W, 7),
        "1U": Instruction(1, Op.U, None),
    }
    assert {str(each): each for each in written.values()} == written
    assert {text: parse(text) for text in written} == written


PROGRAMS = [parse_program("0F0 0F1 0B0 0U 0I1 0W1 0U"), parse_program("1F0 1B0 1U 1F1 1B1 1U")]


def test_programs_are_written_one_line_a_rank():
    assert show_programs(PROGRAMS) == "0F0 0F1 0B0 0U 0I1 0W1 0U\n1F0 1B0 1U 1F1 1B1 1U"
    assert show_csv(PROGRAMS) == "0F0,0F1,0B0,0U,0I1,0W1,0U\n1F0,1B0,1U,1F1,1B1,1U\n"


@given(st.lists(st.lists(instructions, min_size=1)))
def test_programs_read_back_from_text_and_from_csv(programs):
    assert [parse_program(show(program)) for program in programs] == programs
    assert parse_programs(show_programs(programs)) == programs
    assert parse_csv(show_csv(programs)) == programs


def test_comments_and_empty_lines_are_skipped():
    text = "# first rank\n0F0 0B0  # one micro-batch\n\n   1F0 1B0\r\n"
    assert parse_programs(text) == [parse_program("0F0 0B0"), parse_program("1F0 1B0")]


def test_csv_of_torch_loses_what_the_engine_does_itself():
    text = """
0UNSHARD,3UNSHARD,0F0,0SEND_F0,,0RECV_B0,(0F1;3B0)OVERLAP_F_B,0WAIT_SEND_F0, 3I1 ,3W1,3SEND_B1
1UNSHARD,1RECV_F0,1F0,1SEND_F0,(2F1; 1B0)OVERLAP_F_B,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD,,
"""
    assert show_programs(parse_csv(text)) == "0F0 0F1 3B0 3I1 3W1\n1F0 2F1 1B0"


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
