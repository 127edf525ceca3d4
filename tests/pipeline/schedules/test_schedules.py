"""The programs of every schedule: literals, published bubbles and counts in flight, and what is refused."""

import itertools
import re

import pytest
from programs import PER_RANK, laid, most_in_flight, on_paper

from penstock.compression.errors import PlanError, ScheduleError
from penstock.pipeline.schedules import SCHEDULES, schedule_named
from penstock.pipeline.schedules.async_1f1b import StreamState, between
from penstock.pipeline.schedules.building_blocks import placed, placement, stages_on
from penstock.pipeline.schedules.custom import custom
from penstock.pipeline.schedules.instruction import Instruction, Op, parse_program, show
from penstock.pipeline.schedules.synchronous import interleaved, one_f_one_b

ALL = [name for name in SCHEDULES if name != "custom"]
NEIGHBOURS = ("gpipe", "1f1b", "zb_h1", "async_1f1b")
VEE, LOOP = [[0, 3], [1, 2]], [[0, 2], [1, 3]]


# schedule stages-of-each-rank micro-batches extra-in-flight, and the program of every rank
LITERALS = """
1f1b: 0 1 2; 6 micro-batches, 1 extra
    0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5
    1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
    2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5
1f1b: 0,1 2; 2 micro-batches, 0 extra
    0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1
    2F0 2B0 2F1 2B1
gpipe: 0 1,2; 2 micro-batches, 0 extra
    0F0 0F1 0B0 0B1
    1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1
interleaved: 0,2 1,3; 5 micro-batches, 0 extra
    0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 0B2 2B3 2B4 0B3 0B4
    1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4
zb_h1: 0 1 2; 4 micro-batches, 0 extra
    0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3
    1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
zb_h1: 0 1,2; 2 micro-batches, 0 extra
    0F0 0F1 0B0 0B1
    1F0 2F0 2I0 1I0 1F1 2F1 2I1 1I1 2W0 1W0 2W1 1W1
zbv: 0,3 1,2; 3 micro-batches, 0 extra
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0B0 3F2 3I2 3W2 0B1 0B2
    1F0 2F0 1F1 2F1 2B0 1F2 1I0 1W0 2F2 2B1 1I1 2I2 1I2 1W1 2W2 1W2
dualpipev: 0,3 1,2; 4 micro-batches, 0 extra
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0B2 0B3
    1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
async_1f1b: 0 1 2; 4 micro-batches, 0 extra
    0F0 0F1 0F2 0B0 0U 0F3 0B1 0U 0B2 0U 0B3 0U
    1F0 1F1 1B0 1U 1F2 1B1 1U 1F3 1B2 1U 1B3 1U
    2F0 2B0 2U 2F1 2B1 2U 2F2 2B2 2U 2F3 2B3 2U
async_1f1b: 0,1 2; 3 micro-batches, 0 extra
    0F0 1F0 0F1 1F1 1B0 1U 0F2 0B0 0U 1F2 1B1 1U 0B1 0U 1B2 1U 0B2 0U
    2F0 2B0 2U 2F1 2B1 2U 2F2 2B2 2U
"""


def parse_literals():
    """Schedule, stages of each rank, micro-batches, extra in flight and programs of each literal."""
    for text in LITERALS.strip().replace("\n    ", "|").splitlines():
        head, *lines = text.split("|")
        [(name, layout, number, extra)] = re.findall(r"(\w+): (.*); (\d+) .*, (\d+) extra", head)
        ranks = [[int(stage) for stage in rank.split(",")] for rank in layout.split()]
        yield pytest.param(name, ranks, int(number), int(extra), lines, id=head)


@pytest.mark.parametrize(("name", "stages_of_rank", "number", "extra", "lines"), list(parse_literals()))
def test_literals(name, stages_of_rank, number, extra, lines):
    programs = schedule_named(name)(stages_of_rank, number, extra_in_flight=extra)
    assert [show(program) for program in programs] == lines


def test_interleaved_with_one_stage_a_rank_is_1f1b():
    for num_ranks in range(1, 6):
        stages = [[rank] for rank in range(num_ranks)]
        for number in range(1, 12):
            assert interleaved(stages, number) == one_f_one_b(stages, number)


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_the_bubble_is_the_published_one(num_ranks):
    for number in (2 * num_ranks, 2 * num_ranks + 1, 3 * num_ranks):
        programs = {name: SCHEDULES[name](laid(name, num_ranks), number) for name in ALL}
        idle = {
            name: on_paper(*map(show, lines)).seconds - 3 * number * PER_RANK.get(name, 1)
            for name, lines in programs.items()
        }
        assert idle["gpipe"] == idle["1f1b"] == idle["async_1f1b"] == 3 * (num_ranks - 1)
        assert idle["zb_h1"] == idle["zbv"] == idle["dualpipev"] == num_ranks - 1
        if number % num_ranks == 0:  # half of 1F1B's: of two stages a rank each is half as long
            assert idle["interleaved"] == 3 * (num_ranks - 1)


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_no_rank_holds_more_than_the_published_count(num_ranks):
    for number in (1, num_ranks - 1 or 1, num_ranks, 2 * num_ranks, 3 * num_ranks + 1):
        programs = {name: SCHEDULES[name](laid(name, num_ranks), number) for name in ALL}
        for rank in range(num_ranks):
            held = {name: most_in_flight(programs[name][rank], laid(name, num_ranks)[rank]) for name in ALL}
            links = num_ranks - 1 - rank
            assert held["async_1f1b"] == min(number, 1 + links)
            for extra in range(3):
                program = one_f_one_b(laid("1f1b", num_ranks), number, extra_in_flight=extra)[rank]
                assert most_in_flight(program, [rank]) == min(number, 1 + links * (1 + extra))
            assert held["zb_h1"] <= num_ranks  # what 1F1B has on its first rank
            assert held["zbv"] <= 2 * num_ranks  # of stages half as long: the same
            assert held["dualpipev"] <= 2 * num_ranks + 1
            if number % num_ranks == 0:
                assert held["interleaved"] <= num_ranks + 2 * links + 1


def test_a_stream_goes_on_without_a_bubble():
    nine, many = (StreamState(num_stages=3, each=False, ends=(end,)) for end in (9, 10**9))
    assert show(between([0], nine, start=12, stop=18)) == "0F6 0B4 0F7 0B5 0F8 0B6"
    far = between([0, 1, 2], many, start=2 * 10**9 - 2, stop=2 * 10**9)
    assert show(far) == ("1B999999997 0F999999999 2F999999998 0B999999997 2B999999998 1F999999999")


@pytest.mark.parametrize("name", ALL)
def test_the_lines_of_a_schedule_place_its_stages_and_run_as_it_does(name):
    for num_ranks in range(1, 7):
        stages_of_rank = laid(name, num_ranks)
        programs = SCHEDULES[name](stages_of_rank, 5)
        lines = [*map(show, programs)]
        assert placed(lines) == placement(name, stages=sum(map(len, stages_of_rank)), ranks=num_ranks)
        assert name == "async_1f1b" or schedule_named("custom", lines)(stages_of_rank, 5) == programs


def test_a_custom_schedule_leaves_out_the_micro_batches_that_a_step_lacks():
    programs = custom([[0]], 2, program=["0F0 0F1 0F2 0I0 0B1 0W0 0B2"])
    assert programs == [parse_program("0F0 0F1 0I0 0B1 0W0")]


@pytest.mark.parametrize(
    ("program", "micro_batches", "extra", "subject"),
    [
        ((), 1, 0, "found none; give program="),
        (("0F0 0B0", "1F0 1B0"), 2, 0, "micro_batches=2 and 1 in the lines"),
        (("0F0 0B0", "1F0 1B0"), 1, 1, "extra_in_flight=1"),
        (("0F0 0B0 1F0 1B0",), 1, 0, r"\[\[0, 1\]\] in its lines and \[\[0\], \[1\]\] in the plan"),
        (("0F0 0B0", "1F0 2B0"), 1, 0, r"\[\[0\], \[1, 2\]\] in its lines"),
        (("0F0 0B0", "1F0 1Q0"), 1, 0, "'1Q0'"),
        (("0F0 0B0 0U", "1F0 1B0"), 1, 0, "0U in its lines"),
        (("0F0 0B0", "1F0 1B0"), 0, 0, "micro_batches=0"),
    ],
)
def test_a_custom_schedule_that_does_not_fit_is_refused(program, micro_batches, extra, subject):
    with pytest.raises(ScheduleError, match=subject):
        custom([[0], [1]], micro_batches, extra_in_flight=extra, program=program)


def test_an_unknown_name_lists_the_known_ones_and_only_custom_has_lines():
    known = "gpipe, 1f1b, interleaved, zb_h1, zbv, dualpipev, async_1f1b, custom"
    with pytest.raises(ScheduleError, match=f"schedule=2f2b .* {known}"):
        schedule_named("2f2b")
    with pytest.raises(ScheduleError, match="found 2 with schedule=zbv; take schedule=custom"):
        schedule_named("zbv", ("0F0 0B0", "1F0 1B0"))


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_what_no_schedule_of_neighbours_can_run_is_refused(name):
    for stages_of_rank, micro_batches, extra, subject in (
        ([[0], [1]], 0, 0, "micro_batches=0"),
        ([[0], [1]], -3, 0, "micro_batches=-3"),
        ([[0], [1]], 4, -1, "extra_in_flight=-1"),
        ([[0, 2], [1]], 4, 0, r"stages \[0, 2\] on rank 0"),
        ([[0], []], 4, 0, r"stages \[\] on rank 1"),
        ([[0], [0]], 4, 0, r"stages \[0\] on rank 1"),
        ([[1], [0]], 4, 0, r"stages \[1\] on rank 0"),
    ):
        with pytest.raises(ScheduleError, match=subject):
            SCHEDULES[name](stages_of_rank, micro_batches, extra_in_flight=extra)


@pytest.mark.parametrize(
    ("name", "stages_of_rank", "micro_batches", "extra", "subject"),
    [
        ("interleaved", LOOP, 0, 0, "micro_batches=0"),
        ("interleaved", LOOP, 4, 1, "extra_in_flight=1; .*schedule=1f1b"),
        ("interleaved", LOOP, 4, -1, "extra_in_flight=-1"),
        ("interleaved", [[0, 2], [1]], 4, 0, "stages=3 for ranks=2; .*stages=4"),
        ("interleaved", [[0, 1], [2, 3]], 4, 0, r"\[0, 2\] on rank 0, found stages \[0, 1\]"),
        ("zbv", VEE, 4, 2, "extra_in_flight=2"),
        ("zbv", LOOP, 4, 0, r"\[0, 3\] on rank 0, found stages \[0, 2\]"),
        ("dualpipev", VEE, 8, 1, "extra_in_flight=1"),
        ("dualpipev", [[0, 1, 2], [3, 4, 5]], 8, 0, "stages=6 for ranks=2; take stages=4"),
        ("dualpipev", [[1, 2], [0, 3]], 8, 0, r"\[0, 3\] on rank 0, found stages \[1, 2\]"),
        ("async_1f1b", [[0], [1]], 8, 1, "extra_in_flight=1"),
        ("gpipe", [[0], [1]], 4, 1, "extra_in_flight=1.*1f1b"),
    ],
)
def test_what_a_schedule_cannot_run_is_refused(name, stages_of_rank, micro_batches, extra, subject):
    with pytest.raises(ScheduleError, match=subject):
        SCHEDULES[name](stages_of_rank, micro_batches, extra_in_flight=extra)


def test_stages_lie_as_neighbours_in_a_loop_or_in_a_vee():
    assert placement("1f1b", stages=4, ranks=2) == (0, 0, 1, 1)
    assert placement("zb_h1", stages=5, ranks=2) == (0, 0, 0, 1, 1)
    assert placement("interleaved", stages=6, ranks=2) == (0, 1, 0, 1, 0, 1)
    assert placement("zbv", stages=6, ranks=3) == (0, 1, 2, 2, 1, 0)
    assert placement("dualpipev", stages=2, ranks=1) == (0, 0)
    assert placement("async_1f1b", stages=4, ranks=2) == placement("gpipe", stages=4, ranks=2) == (0, 0, 1, 1)
    assert stages_on((0, 1, 0, 2)) == [[0, 2], [1], [3]]


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks", "subject"),
    [
        ("1f1b", 2, 3, "ranks=3 for stages=2; lower ranks"),
        ("1f1b", 2, 0, "ranks=0"),
        ("interleaved", 5, 2, "stages=5 for ranks=2; .* stages=6"),
        ("zbv", 3, 3, "stages=3 for ranks=3; take stages=6"),
        ("dualpipev", 6, 2, "stages=6 for ranks=2; take stages=4"),
        ("custom", 2, 2, "found none; give program="),
    ],
)
def test_what_cannot_be_placed_is_refused(schedule, stages, ranks, subject):
    with pytest.raises(PlanError, match=subject):
        placement(schedule, stages=stages, ranks=ranks)


def test_lines_that_place_no_pipeline_are_refused():
    for lines, subject in (
        (["0F0 1F0", "1B0 0B0"], "stage 1 on ranks 0 and 1"),
        (["0F0 0B0", "2F0 2B0"], "stage 1 is in none of 2 lines"),
        ([], "found none; give program="),
        (["nothing to run"], "stage 0 is in none of 1 lines"),
    ):
        with pytest.raises(PlanError, match=subject):
            placed(lines)


def fed(num_stages, sizes, *, each=True):
    return StreamState(num_stages=num_stages, each=each, ends=tuple(itertools.accumulate(sizes)))


def test_one_update_a_batch_waits_for_all_stages():
    two = fed(3, [3, 3], each=False)
    assert [show(between([stage], two)) for stage in range(3)] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0U 0F5 0B3 0B4 0B5 0U",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1U 1B3 1F5 1B4 1B5 1U",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2U 2F4 2B4 2F5 2B5 2U",
    ]


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
