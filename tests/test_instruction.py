import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.compression.errors import ScheduleError
from penstock.pipeline.instruction import Instruction, Op, parse, parse_program, show

numbers = st.integers(0, 10_000)
instructions = st.one_of(
    st.builds(Instruction, numbers, st.sampled_from([Op.F, Op.B]), numbers),
    st.builds(Instruction, numbers, st.just(Op.U)),
)


def test_an_instruction_prints_as_stage_op_and_micro_batch():
    assert str(Instruction(1, Op.F, 3)) == "1F3"
    assert str(Instruction(12, Op.B, 0)) == "12B0"
    assert str(Instruction(1, Op.U, None)) == "1U"


def test_an_instruction_parses_back():
    assert parse("1F3") == Instruction(1, Op.F, 3)
    assert parse("0B11") == Instruction(0, Op.B, 11)
    assert parse("2U") == Instruction(2, Op.U, None)


@settings(deadline=None, derandomize=True)
@given(st.lists(instructions))
def test_what_show_writes_parse_program_reads(program):
    assert parse_program(show(program)) == program


@pytest.mark.parametrize(
    "text", ["", "F3", "1F", "1U3", "1X3", "-1F3", "1F-3", "1f3", "1F3 ", "1F3 1F4", "1F٣"]
)
def test_anything_else_is_refused_and_named(text):
    with pytest.raises(ScheduleError, match="write it like 1F3 or 1U") as error:
        parse(text)
    assert repr(text) in str(error.value)


def test_a_program_names_the_word_it_cannot_read():
    with pytest.raises(ScheduleError, match="'0Q1'"):
        parse_program("0F0 0Q1 0B0")
