from itertools import product

import pytest
from programs import laid

from penstock.compression.errors import PlanError
from penstock.pipeline.schedules import SCHEDULES
from penstock.pipeline.schedules.building_blocks import placed, placement, stages_on
from penstock.pipeline.schedules.custom import show_programs
from penstock.pipeline.schedules.synchronous import rounds


def test_stages_lie_as_neighbours_in_a_loop_or_in_a_vee():
    assert placement("1f1b", stages=4, ranks=2) == (0, 0, 1, 1)
    assert placement("zb_h1", stages=5, ranks=2) == (0, 0, 0, 1, 1)
    assert placement("interleaved", stages=6, ranks=2) == (0, 1, 0, 1, 0, 1)
    assert placement("zbv", stages=6, ranks=3) == (0, 1, 2, 2, 1, 0)
    assert placement("dualpipev", stages=2, ranks=1) == (0, 0)
    assert placement("async_1f1b", stages=4, ranks=2) == placement("gpipe", stages=4, ranks=2) == (0, 0, 1, 1)
    assert stages_on((0, 1, 0, 2)) == [[0, 2], [1], [3]]


def test_the_lines_of_a_schedule_place_its_stages_as_it_did():
    for name, num_ranks in product((name for name in SCHEDULES if name != "custom"), range(1, 7)):
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
