import pytest

from penstock.compression.errors import ScheduleError
from penstock.pipeline.instruction import Op, show
from penstock.pipeline.schedules import SCHEDULES, schedule_named
from penstock.pipeline.schedules.gpipe import gpipe
from penstock.pipeline.schedules.one_f_one_b import one_f_one_b


def shown(programs):
    return [show(program) for program in programs]


def most_in_flight(program):
    """The largest number of micro-batches between F and B of the program's first stage."""
    stage, now, most = program[0].stage, 0, 0
    for instruction in program:
        if instruction.stage == stage:
            now += 1 if instruction.op is Op.F else -1
        most = max(most, now)
    return most


def test_one_f_one_b_alternates_after_its_warm_up():
    assert shown(one_f_one_b([[0], [1]], 3)) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def test_one_f_one_b_of_four_ranks():
    assert shown(one_f_one_b([[0], [1], [2], [3]], 5)) == [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0B2 0B3 0B4",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2B4",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4",
    ]


def test_one_f_one_b_with_one_more_in_flight_per_link():
    assert shown(one_f_one_b([[0], [1], [2]], 6, extra_in_flight=1)) == [
        "0F0 0F1 0F2 0F3 0F4 0B0 0F5 0B1 0B2 0B3 0B4 0B5",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5",
    ]


def test_one_f_one_b_with_fewer_micro_batches_than_stages():
    assert shown(one_f_one_b([[0], [1], [2]], 2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"]
    assert shown(one_f_one_b([[0], [1], [2]], 1, extra_in_flight=2)) == ["0F0 0B0", "1F0 1B0", "2F0 2B0"]


def test_the_stages_of_a_rank_run_as_one_unit():
    assert shown(one_f_one_b([[0, 1], [2]], 2)) == ["0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", "2F0 2B0 2F1 2B1"]
    assert shown(gpipe([[0], [1, 2]], 2)) == ["0F0 0F1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"]


def test_one_stage_alone():
    assert shown(one_f_one_b([[0]], 2, extra_in_flight=3)) == ["0F0 0B0 0F1 0B1"]
    assert shown(gpipe([[0]], 2)) == ["0F0 0F1 0B0 0B1"]


def test_gpipe_runs_all_forwards_then_all_backwards_ascending():
    assert shown(gpipe([[0], [1]], 3)) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


@pytest.mark.parametrize("extra", [0, 1, 2])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_one_f_one_b_keeps_no_more_in_flight_than_the_ranks_to_the_end(num_ranks, extra):
    programs = one_f_one_b([[rank] for rank in range(num_ranks)], 40, extra_in_flight=extra)
    links = [num_ranks - 1 - rank for rank in range(num_ranks)]
    assert [most_in_flight(program) for program in programs] == [1 + link * (1 + extra) for link in links]


def test_a_schedule_is_found_by_its_name():
    assert {name: schedule_named(name) for name in SCHEDULES} == {"gpipe": gpipe, "1f1b": one_f_one_b}


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ScheduleError, match=r"^schedule=2f2b is not known; the known ones are gpipe, 1f1b$"):
        schedule_named("2f2b")


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=list(SCHEDULES))
@pytest.mark.parametrize(
    ("stages_of_rank", "micro_batches", "extra", "named"),
    [
        ([[0], [1]], 0, 0, "micro_batches=0"),
        ([[0], [1]], -3, 0, "micro_batches=-3"),
        ([[0], [1]], 4, -1, "extra_in_flight=-1"),
        ([[0, 2], [1]], 4, 0, r"stages \[0, 2\] on rank 0"),
        ([[0], []], 4, 0, r"stages \[\] on rank 1"),
        ([[0], [0]], 4, 0, r"stages \[0\] on rank 1"),
        ([[1], [0]], 4, 0, r"stages \[1\] on rank 0"),
    ],
)
def test_what_no_schedule_can_run_is_refused_by_name(schedule, stages_of_rank, micro_batches, extra, named):
    with pytest.raises(ScheduleError, match=named):
        schedule(stages_of_rank, micro_batches, extra_in_flight=extra)


def test_gpipe_refuses_extra_in_flight():
    with pytest.raises(ScheduleError, match=r"extra_in_flight=1.*1f1b"):
        gpipe([[0], [1]], 4, extra_in_flight=1)
