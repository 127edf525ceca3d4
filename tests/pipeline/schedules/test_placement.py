import pytest
from programs import laid

from penstock.compression.errors import PlanError
from penstock.pipeline.schedules import SCHEDULES
from penstock.pipeline.schedules.interleaved import rounds
from penstock.pipeline.schedules.placement import layout, placed, placement, stages_on
from penstock.pipeline.schedules.written import show_programs

ALL = [name for name in SCHEDULES if name != "custom"]


def test_every_schedule_has_a_layout():
    assert {name: layout(name) for name in SCHEDULES} == {
        "gpipe": "neighbours",
        "1f1b": "neighbours",
        "interleaved": "loop",
        "zb_h1": "neighbours",
        "zbv": "vee",
        "dualpipev": "vee",
        "async_1f1b": "neighbours",
        "custom": "custom",
    }


def test_stages_lie_as_neighbours_in_a_loop_or_in_a_vee():
    assert placement("1f1b", stages=4, ranks=2) == (0, 0, 1, 1)
    assert placement("zb_h1", stages=5, ranks=2) == (0, 0, 0, 1, 1)
    assert placement("interleaved", stages=6, ranks=2) == (0, 1, 0, 1, 0, 1)
    assert placement("zbv", stages=6, ranks=3) == (0, 1, 2, 2, 1, 0)
    assert placement("dualpipev", stages=2, ranks=1) == (0, 0)
    assert stages_on((0, 1, 0, 2)) == [[0, 2], [1], [3]]


@pytest.mark.parametrize("name", ALL)
def test_the_lines_of_a_schedule_place_its_stages_as_it_did(name):
    for num_ranks in range(1, 7):
        stages_of_rank = laid(name, num_ranks)
        lines = show_programs(SCHEDULES[name](stages_of_rank, 3)).splitlines()
        num_stages = sum(map(len, stages_of_rank))
        assert placed(lines) == placement(name, stages=num_stages, ranks=num_ranks)


def test_rounds_are_as_equal_as_can_be_and_no_shorter_than_the_ranks():
    assert rounds(8, 4) == [4, 4]
    assert rounds(11, 4) == [6, 5]
    assert rounds(7, 4) == [7]
    assert rounds(2, 4) == [2]
    for ranks in range(1, 9):
        for number in range(1, 40):
            sizes = rounds(number, ranks)
            assert sum(sizes) == number
            assert max(sizes) - min(sizes) <= 1
            assert min(sizes) >= min(ranks, number)


@pytest.mark.parametrize(
    ("schedule", "stages", "ranks", "sentence"),
    [
        ("1f1b", 2, 3, "every rank runs a stage, found ranks=3 for stages=2; lower ranks"),
        ("1f1b", 2, 0, "found ranks=0"),
        ("interleaved", 5, 2, "the same number of stages, found stages=5 for ranks=2; .* such as stages=6"),
        ("zbv", 3, 3, "two stages, found stages=3 for ranks=3; take stages=6"),
        ("dualpipev", 6, 2, "two stages, found stages=6 for ranks=2; take stages=4"),
        ("custom", 2, 2, "schedule=custom runs the lines of its program, found none; give program="),
    ],
)
def test_what_cannot_be_placed_is_refused(schedule, stages, ranks, sentence):
    with pytest.raises(PlanError, match=sentence) as error:
        placement(schedule, stages=stages, ranks=ranks)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["0F0 1F0", "1B0 0B0"], "found stage 1 on ranks 0 and 1; keep it in one line"),
        (["0F0 0B0", "2F0 2B0"], "stage 1 is in none of 2 lines"),
        ([], "found none; give program="),
        (["nothing to run"], "stage 0 is in none of 1 lines"),
    ],
)
def test_lines_that_place_no_pipeline_are_refused(lines, sentence):
    with pytest.raises(PlanError, match=sentence):
        placed(lines)
