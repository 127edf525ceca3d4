"""The search counts as waiting on a stage exactly what the programs that will run make wait there."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import layer_of, profile_of
from programs import laid, most_in_flight

import penstock
from penstock import partition
from penstock.pipeline.schedules import SCHEDULES
from penstock.pipeline.schedules.building_blocks import layout
from penstock.pipeline.schedules.replicated import endless_programs, predicted_bytes, step_programs, waiting
from penstock.stages.weight_versions.policies import rule_named

FLUSHED = [name for name in SCHEDULES if name not in ("custom", "async_1f1b")]
ENDLESS = [("async_1f1b", "latest"), ("async_1f1b", "stashed"), ("async_1f1b", "vertical_sync")]
ENDLESS += [("1f1b", "double_buffered")]


def planned(schedule, *, stages, **options):
    """The plan of a model with a layer for each stage, which saves a byte there and has no parameters."""
    profile = profile_of([layer_of(f"l{i}", saved=1) for i in range(stages)])
    return partition(profile, schedule=schedule, stages=stages, **options)


@pytest.mark.parametrize("schedule", FLUSHED)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 12), st.integers(0, 2))
def test_planned_memory_counts_what_the_plan_s_program_keeps(schedule, num_ranks, per_rank, number, extra):
    per_rank = 2 if layout(schedule) == "vee" else per_rank
    options = {"ranks": num_ranks, "micro_batches": number}
    options["extra_in_flight"] = extra if schedule in ("1f1b", "zb_h1") else 0
    plan = planned(schedule, stages=num_ranks * per_rank, **options)
    assert plan.stages_of_rank == laid(schedule, num_ranks, per_rank)
    programs = step_programs(plan)
    for number_of, stage in enumerate(plan.stages):
        (rank,) = stage.ranks
        assert stage.memory_bytes == most_in_flight(programs[rank], [number_of])


@pytest.mark.parametrize(("schedule", "weights"), ENDLESS)
def test_a_stream_keeps_as_many_as_there_are_stages_to_the_end(schedule, weights):
    """Whatever a batch has."""
    for number, stages in product((1, 2, 3, 5, 8, 30), range(1, 6)):
        if weights == "double_buffered" and number < stages:
            continue
        plan = planned(schedule, stages=stages, micro_batches=number, weights=weights)
        assert [stage.memory_bytes for stage in plan.stages] == list(range(stages, 0, -1))
        alone = [[stage] for stage in range(stages)]
        programs = endless_programs(alone, schedule=schedule, micro_batches=number, more=2)
        found = [old for _, old in waiting(programs, weights=weights, micro_batches=number)]
        assert found == [rule_named(weights).old_versions(stage, stages) for stage in range(stages)]


def test_the_lines_of_a_custom_schedule_say_what_waits():
    lines = ("0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2")
    plan = planned("custom", stages=2, micro_batches=3, program=lines)
    assert [stage.memory_bytes for stage in plan.stages] == [2, 1]


@pytest.mark.parametrize(
    ("schedule", "options", "most"),
    [
        ("1f1b", {}, 2),
        ("zb_h1", {}, 2),
        ("gpipe", {}, 0),
        ("interleaved", {"stages": 4}, 0),
        ("async_1f1b", {}, 0),
        ("1f1b", {"ranks": 1}, 0),
        ("1f1b", {"micro_batches": 3}, 1),
        ("1f1b", {"micro_batches": 1}, 0),
        ("1f1b", {"extra_in_flight": 1}, 1),
        ("1f1b", {"weights": "double_buffered"}, 0),
    ],
    ids=str,
)
def test_more_may_fly_where_the_schedule_takes_them(schedule, options, most):
    plan = planned(schedule, **{"stages": 2, "ranks": 2, "micro_batches": 8} | options)
    assert plan.most_extra_in_flight == most
    assert plan.extra_in_flight == options.get("extra_in_flight", 0)


@pytest.mark.parametrize(("memory", "most"), [(2000, 0), (3200, 1), (4300, 2), (10_000, 2)])
def test_no_more_may_fly_than_memory_holds(memory, most):
    """Each of the first stage's micro-batches saves 1000 bytes: two in flight, three, or four, and 5 %."""
    profile = profile_of([layer_of(f"l{i}", saved=1000 if i == 0 else 0) for i in range(2)])
    if memory < 2100:
        with pytest.raises(penstock.PlanError, match="raise memory"):
            partition(profile, stages=2, memory=memory)
        memory = 2100
    plan = partition(profile, stages=2, memory=memory)
    assert plan.most_extra_in_flight == most
    assert plan.stages[0].memory_bytes == 2000
    assert predicted_bytes(plan, [2 + most, 1]) == [1000 * (2 + most), 0]
