"""Ranks divided over stages by the planner: what brute force over all divisions finds in made-up profiles."""

import dataclasses
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import NET, layer_of, profile_of, profiles, value_of

from penstock.compression.errors import PlanError
from penstock.pipeline.partition import divide
from penstock.pipeline.partition.choose import TooSmall
from penstock.pipeline.partition.partition import partition
from penstock.pipeline.schedules.replicated import step_programs
from penstock.pipeline.schedules.simulate import EXCHANGE_RATE, exchange_seconds, simulate_plan

FIRST_SLOW = profile_of(
    [layer_of("a", forward=20, backward=40, size=40), layer_of("b", forward=10, backward=20, size=40)],
    [value_of(i, [i + 1]) for i in range(-1, 2)],
)


def seconds_of(plan):
    return simulate_plan(plan, step_programs(plan)).seconds


def by_brute_force(profile, ranks, stages=None, **options):
    """The shortest step of all plans with replicas that add up to ``ranks``."""
    found = []
    for number in [stages] if stages else range(1, ranks + 1):
        for counts in product(range(1, ranks + 1), repeat=number):
            if sum(counts) == ranks:
                try:
                    found.append(seconds_of(partition(profile, codec="raw", replicas=counts, **options)))
                except PlanError:
                    continue
    return min(found, default=None)


@given(
    profiles(), st.integers(1, 5), st.integers(1, 6), st.sampled_from([None, "8kbit", "1Mbit"]), st.booleans()
)
def test_the_division_is_the_one_that_brute_force_finds(profile, ranks, micro_batches, link, exact):
    options = {"micro_batches": micro_batches, "link": link, "exact": exact}
    least = by_brute_force(profile, ranks, **options)
    if least is None:
        with pytest.raises(PlanError):
            partition(profile, codec="raw", ranks=ranks, replicas="auto", **options)
        return
    plan = partition(profile, codec="raw", ranks=ranks, replicas="auto", **options)
    assert plan.num_ranks == ranks
    assert seconds_of(plan) == pytest.approx(least)


def test_what_gradients_take_to_exchange_counts():
    heavy = [dataclasses.replace(layer, num_parameters=10**8) for layer in FIRST_SLOW.layers]
    profile = dataclasses.replace(FIRST_SLOW, layers=tuple(heavy))
    plan = partition(profile, codec="raw", ranks=2, replicas="auto")
    assert plan.replicas == (1, 1)
    two = partition(FIRST_SLOW, codec="raw", replicas=[2], micro_batches=4)
    size = 4 * two.stages[0].num_parameters
    there_back_and_a_round, exact = 3 * size / EXCHANGE_RATE, dataclasses.replace(two, exact=True)
    assert exchange_seconds(two, 0) == pytest.approx(there_back_and_a_round)
    assert exchange_seconds(exact, 0) == pytest.approx(1.5 * there_back_and_a_round)
    assert exchange_seconds(dataclasses.replace(two, link=8e3), 0) == pytest.approx(size / 1e3, rel=1e-3)
    assert exchange_seconds(partition(FIRST_SLOW, codec="raw", stages=1), 0) == 0.0
    one = partition(FIRST_SLOW, codec="raw", replicas=[1], micro_batches=4)
    assert seconds_of(two) == pytest.approx(seconds_of(one) / 2 + exchange_seconds(two, 0))


def test_ranks_stay_idle_only_where_that_is_allowed():
    options = {"codec": "raw", "stages": 1, "micro_batches": 4, "replicas": "auto"}
    assert partition(FIRST_SLOW, ranks=3, **options).replicas == (3,)
    two_turns = partition(FIRST_SLOW, ranks=3, idle=True, **options)
    assert two_turns.replicas == (2,)
    plan = partition(FIRST_SLOW, ranks=9, idle=True, **options)
    assert (plan.replicas, str(plan.asked)) == ((4,), "stages=1 ranks=9 replicas=auto, idle")
    with pytest.raises(PlanError, match="ranks=9 for 1 stages and micro_batches=4"):
        partition(FIRST_SLOW, ranks=9, **options)


def test_walking_gives_the_slowest_stage_the_next_rank():
    def walked(**options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(divide, "MOST", 0)
            return partition(FIRST_SLOW, codec="raw", replicas="auto", **options)

    for ranks in (2, 3, 5, 6):
        plan = partition(FIRST_SLOW, codec="raw", cuts=["a"], ranks=ranks, replicas="auto")
        assert walked(cuts=["a"], ranks=ranks) == plan
    assert walked(cuts=["a"], ranks=4).replicas == (3, 1)  # and not (2, 2), which is a little shorter
    assert walked(cuts=["a"], ranks=4, micro_batches=2).replicas == (2, 2)  # no replica without a micro-batch
    assert walked(stages=2, ranks=30, micro_batches=40).replicas == (20, 10)
    assert walked(stages=1, ranks=3, micro_batches=4, idle=True).replicas == (2,)


def test_a_budget_that_nothing_fits_is_refused_with_the_least_one():
    with pytest.raises(TooSmall) as refused:
        partition(NET, codec="raw", ranks=2, replicas="auto", memory=100)
    least = min(needed([2]), needed([1, 1]))
    assert refused.value.needed == least
    plan = partition(NET, codec="raw", ranks=2, replicas="auto", memory=least)
    assert plan.replicas == (1, 1)  # the layers of both stages do not fit one rank


def needed(replicas):
    with pytest.raises(TooSmall) as refused:
        partition(NET, codec="raw", replicas=replicas, memory=100)
    return refused.value.needed
