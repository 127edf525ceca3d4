"""Memory of a plan: open tiers, shares of the memory, and what the programs make wait on a stage."""

import dataclasses
import functools
import itertools
from itertools import product
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from profiles import layer_of, profile_of, profiles, value_of
from programs import laid, most_in_flight

import penstock
from penstock import PlanError, partition
from penstock.pipeline.partition.choose import TooSmall
from penstock.pipeline.partition.costs import with_margin
from penstock.pipeline.schedules import SCHEDULES
from penstock.pipeline.schedules.building_blocks import layout
from penstock.pipeline.schedules.replicated import endless_programs, predicted_bytes, step_programs, waiting
from penstock.stages.plan.memory_model import copies
from penstock.stages.profiling.network_profile import Profile, sizes_of
from penstock.stages.weight_versions.policies import rule_named

OPEN: dict[str, Any] = {"tier": "auto", "parameters_tier": "auto", "disk_rate": 1e9, "optimizer_state": 1.0}
KIB = 1024


def net(
    *, saved: int = 100 * KIB, size: int = 10 * KIB, packed: int | None = None, depth: int = 24
) -> Profile:
    layers = [
        layer_of(f"l{i}", forward=5, backward=10, size=size, saved=saved, packed=packed) for i in range(depth)
    ]
    return profile_of(layers, [value_of(i, [i + 1], 4 * KIB) for i in range(-1, depth)])


def chosen(profile: Profile, memory: int | str | None, **options):
    plan = partition(profile, stages=1, micro_batches=4, schedule="gpipe", memory=memory, **OPEN | options)
    (stage,) = plan.stages
    return stage.tier, stage.parameters_tier, stage.recompute


FITS = ("device", "device", False)
ON_GPU = dataclasses.replace(net(saved=KIB, size=500 * KIB), device="cuda")


@pytest.mark.parametrize(
    ("profile", "memory", "options", "expected"),
    [
        # nothing is moved where all fits or nothing limits
        (net(), None, {}, FITS),
        (net(), "1GiB", {}, FITS),
        (net(), "100%", {}, FITS),
        # the cheapest that fits; a slow disk is worse than a second forward
        (net(packed=20 * KIB), "60%", {}, ("packed", "device", False)),
        (net(packed=90 * KIB), "60%", {}, ("disk", "device", False)),
        (net(saved=1 * KIB, size=500 * KIB), "50%", {}, ("device", "disk", False)),
        (net(size=100 * KIB), "25%", {}, ("disk", "disk", False)),
        (net(packed=90 * KIB), "60%", {"disk_rate": 1e6}, ("device", "device", True)),
        (net(packed=90 * KIB), "60%", {"disk_rate": 0}, ("device", "device", True)),
        # what a person fixed stays
        (net(packed=20 * KIB), "60%", {"tier": "disk"}, ("disk", "device", False)),
        (net(packed=20 * KIB), "60%", {"parameters_tier": "disk"}, (None, "disk", None)),
        (net(), None, {"recompute": True}, ("device", "device", True)),
        (net(), "60%", {"recompute": True}, (None, None, True)),
        # on a GPU parameters go to host memory first
        (ON_GPU, "50%", {}, ("device", "host", False)),
    ],
)
def test_the_cheapest_that_fits_is_taken(profile, memory, options, expected):
    found = chosen(profile, memory, **options)
    assert all(want in (None, got) for want, got in zip(expected, found, strict=True))


def with_room(num_bytes: int) -> int:
    """The least budget of which so many are left beside the margin, and the eighth that no plan fills."""
    least = num_bytes * 840 // 695 - 10  # of which 100 / 105 - 1 / 8 remain
    return next(n for n in itertools.count(least) if n * 100 // 105 - n // 8 >= num_bytes)


@pytest.mark.parametrize(
    ("tier", "saved", "room", "expected"),
    [
        ("device", KIB, 60 * KIB, 20 * KIB),  # weights, gradients, momentum
        ("disk", KIB, 60 * KIB, 10 * KIB),  # half of the room is for saved tensors
        ("device", KIB, 3 * KIB - 1, KIB - 1),
        ("device", KIB, 1 << 30, 24 * 10 * KIB),  # all there are
    ],
)
def test_parameters_stay_as_far_as_there_is_room(tier, saved, room, expected):
    options = {"stages": 1, "micro_batches": 4, "schedule": "gpipe", "tier": tier, "parameters_tier": "disk"}
    (least,) = partition(net(saved=saved), **options).stages
    memory = with_room(least.memory_bytes + room)
    (stage,) = partition(net(saved=saved), memory=memory, **options).stages
    assert (least.staying_bytes, stage.staying_bytes) == (0, expected)
    assert stage.memory_bytes == least.memory_bytes + 3 * expected


def test_one_layers_parameters_are_there_at_a_time_where_nothing_else_fits():
    mib = 1 << 20
    profile = net(saved=KIB, size=8 * mib, depth=6)
    options: dict[str, Any] = {"stages": 1, "micro_batches": 4, "schedule": "gpipe", "optimizer_state": 2.0}
    options |= {"parameters_tier": "disk", "by_element": True}

    def memory_bytes(**other) -> int:
        (stage,) = partition(profile, **options | other).stages
        return stage.memory_bytes - 4 * 6 * KIB

    assert memory_bytes(prefetches=True) == (3 + 1) * 8 * mib + 2 * mib
    assert memory_bytes(prefetches=False) == (1 + 1) * 8 * mib + 2 * mib
    assert memory_bytes(prefetches=False, by_element=False) == 4 * 8 * mib
    least = with_margin(18 * mib + 4 * 6 * KIB)
    for memory, expected in ((with_margin(34 * mib + 4 * 6 * KIB), True), (least, False)):
        (stage,) = partition(profile, memory=memory, **options).stages
        assert stage.prefetches is expected
    with pytest.raises(TooSmall, match="one layer's at a time; raise memory") as refused:
        partition(profile, memory=least - 1, **options)
    assert refused.value.needed == least


def test_stages_of_a_rank_share_what_room_there_is():
    options = {"stages": 2, "ranks": 1, "micro_batches": 4, "parameters_tier": "disk"}
    stages = partition(net(), **options).stages
    least = sum(stage.held_bytes for stage in stages)
    plan = partition(net(), memory=with_room(least + 450 * KIB), **options)
    assert [stage.staying_bytes for stage in plan.stages] == [120 * KIB, 30 * KIB]


def test_a_share_is_that_of_what_is_held_when_nothing_moves():
    kept = partition(net(), stages=2, micro_batches=4)
    whole = with_margin(max(stage.held_bytes for stage in kept.stages))
    assert partition(net(), stages=2, micro_batches=4, memory="50%", **OPEN).memory == round(whole / 2)


@pytest.mark.parametrize(
    ("schedule", "stages"), [("gpipe", 2), ("async_1f1b", 2), ("gpipe", 4), ("interleaved", 4), ("zbv", 4)]
)
def test_below_the_least_feasible_it_is_refused_with_a_figure_that_is_accepted(schedule, stages):
    several = stages > 2  # on a rank, so that not all cuts are tried: a budget that does
    options = OPEN | {"stages": stages, "ranks": 2, "micro_batches": 4, "schedule": schedule}
    said = "a budget that does" if several else "the smallest budget that does"
    with pytest.raises(TooSmall, match=f"^memory=5% .*{said} is memory=") as refused:
        partition(net(), memory="5%", **options)
    needed = refused.value.needed
    assert f"is memory={needed} " in str(refused.value)
    plan = partition(net(), memory=needed, **options)
    assert plan.memory == needed
    assert schedule != "async_1f1b" or not any(stage.recompute for stage in plan.stages)  # it runs once
    if not several:
        with pytest.raises(TooSmall, match="smallest budget"):
            partition(net(), memory=needed - 1, **options)


def test_what_does_not_suit_the_schedule_is_no_choice():
    options: dict[str, Any] = OPEN | {"stages": 2, "micro_batches": 4, "schedule": "async_1f1b"}
    options |= {"weights": "stashed", "prediction": True}
    plan = partition(net(size=200 * KIB), memory="85%", **options)
    assert {stage.parameters_tier for stage in plan.stages} == {"device"}
    with pytest.raises(PlanError, match="found prediction=true and parameters disk"):
        partition(net(), memory="70%", **{**options, "parameters_tier": "disk"})


def test_statistics_of_replicas_leave_no_second_forward_to_choose():
    options = OPEN | {"micro_batches": 4, "replicas": 2, "memory": "70%", "disk_rate": 0, "schedule": "gpipe"}
    profile = net(packed=99 * KIB)
    assert partition(profile, stages=1, **options).stages[0].recompute
    normed = dataclasses.replace(profile, written=("bn.running_mean",))
    with pytest.raises(TooSmall) as refused:
        partition(normed, stages=1, **options)
    plan = partition(normed, stages=1, **{**options, "memory": refused.value.needed})
    assert not plan.stages[0].recompute
    with pytest.raises(PlanError, match=r"bn\.running_mean"):
        partition(normed, stages=1, replicas=2, micro_batches=4, recompute=True)


def test_what_is_no_share_is_refused():
    for share in ("0%", "101%", "x%", "-5%", "%"):
        with pytest.raises(PlanError, match="is not a share above 0% and up to 100%"):
            chosen(net(), share)


def most_needed(plan) -> int:
    return max(with_margin(stage.held_bytes) for stage in plan.stages)


@given(profiles(), st.integers(1, 3), st.sampled_from(["device", "packed", "disk"]), st.booleans())
def test_the_least_budget_is_that_of_brute_force(profile, stages, tier, again):
    options = {"micro_batches": 4, "schedule": "gpipe", "parameters_tier": "disk", "recompute": again}
    options["tier"] = "device" if again else tier
    names = [layer.name for layer in profile.layers]
    legal = [name for place, name in enumerate(names[:-1]) if place not in profile.refused]
    assume(len(legal) >= stages - 1)
    ways = [{"cuts": list(cuts)} for cuts in itertools.combinations(legal, stages - 1)]
    least_of = functools.partial(partition, profile, prefetches=False, **options)
    plans = [least_of(**way) for way in (ways if stages > 1 else [{"stages": 1}])]
    needed = min(most_needed(plan) for plan in plans)
    assume(needed > 1)
    plan = partition(profile, stages=stages, memory=needed, **options)
    assert most_needed(plan) <= needed
    with pytest.raises(PlanError, match=f"smallest budget that does is memory={needed} "):
        partition(profile, stages=stages, memory=needed - 1, **options)


@given(profiles(), st.integers(1, 3), st.sampled_from(["packed", "disk"]))
def test_a_stage_is_counted_as_its_own_layers_are(profile, stages, tier):
    """The search counts near layers by sums made once; whoever has the layers counts them again."""
    options = {"micro_batches": 4, "schedule": "gpipe", "tier": tier, "parameters_tier": "disk"}
    legal = [p for p in range(len(profile.layers) - 1) if p not in profile.refused]
    assume(len(legal) >= stages - 1)
    plan = partition(profile, stages=stages, **options)
    layers = {layer.name: layer for layer in profile.layers}
    for stage in plan.stages:
        sizes = sizes_of([layers[name] for name in stage.layers])
        there = copies(4, tier=tier, parameters_tier="disk", device=profile.device)
        assert stage.memory_bytes == there.of(**sizes)
        assert stage.near_bytes == sizes["near"]


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
