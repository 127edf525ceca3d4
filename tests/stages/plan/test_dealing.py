"""Division of micro-batches by weight: literals, laws of any weights, shares that give out nothing."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import NET

from penstock.compression.errors import PlanError
from penstock.pipeline.partition.partition import partition
from penstock.stages.plan.plan_stage import counts_of, place_of, split_shares

WEIGHTS = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any).map(tuple)


def dealt(shares, number):
    return [place_of(shares, micro_batch) for micro_batch in range(number)]


@pytest.mark.parametrize(
    ("shares", "places"),
    [
        ((1, 1), [0, 1, 0, 1, 0, 1, 0, 1]),
        ((1, 1, 1), [0, 1, 2, 0, 1, 2, 0, 1]),
        ((3, 1), [0, 0, 1, 0, 0, 0, 1, 0]),
        ((1, 3), [1, 0, 1, 1, 1, 0, 1, 1]),
        ((5, 1, 1), [0, 0, 1, 0, 2, 0, 0, 0]),  # the example of nginx
        ((0, 2), [1, 1, 1, 1, 1, 1, 1, 1]),
        ((29, 3), [0, 0, 0, 0, 0, 1, 0, 0]),
    ],
)
def test_literals(shares, places):
    assert dealt(shares, 8) == places


@given(WEIGHTS, st.integers(1, 3), st.integers(1, 5))
def test_a_round_has_each_share_and_repeats_and_depends_on_proportions_alone(shares, rounds, factor):
    total = sum(shares)
    found = dealt(shares, rounds * total)
    assert [found.count(place) for place in range(len(shares))] == [rounds * share for share in shares]
    assert found == found[:total] * rounds
    assert found == dealt(tuple(factor * share for share in shares), rounds * total)
    assert counts_of(shares, len(found) - 1) == [found[:-1].count(place) for place in range(len(shares))]


@given(st.tuples(st.integers(0, 20), st.integers(0, 20)).filter(any))
def test_two_replicas_are_never_further_than_one_from_what_is_due(shares):
    found = dealt(shares, 2 * sum(shares))
    for number in range(len(found) + 1):
        due = number * shares[0] / sum(shares)
        assert abs(found[:number].count(0) - due) < 1


def test_a_plan_deals_by_the_shares_of_its_stages_and_its_owners_stay():
    plan = partition(NET, replicas=[2, 2], shares=[3, 1, 0, 2], micro_batches=4, codec="raw")
    assert [stage.shares for stage in plan.stages] == [(3, 1), (0, 2)]
    assert [plan.rank_of(stage, m) for stage in (0, 1) for m in range(4)] == [0, 0, 1, 0, 3, 3, 3, 3]
    assert [plan.owner(0), plan.owner(1), plan.owner(-1)] == [0, 2, 2]
    assert "shares [[3, 1], [0, 2]]" in str(plan)
    even = plan.with_shares([(), (5, 5)])
    alike = partition(NET, replicas=[2, 2], micro_batches=4, codec="raw").with_shares([(1, 1), ()])
    frames = [one.frame_bytes for one in even.stages]  # of the shares that it was made for
    stages = tuple(
        dataclasses.replace(one, frame_bytes=number) for one, number in zip(alike.stages, frames, strict=True)
    )
    assert even == dataclasses.replace(alike, stages=stages)
    assert even.shares == ((1, 1), (1, 1))
    assert "shares" not in str(even)


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ((3, -1), r"found -1 in shares \[3, -1\]"),
        ((3, 1, 1), r"found shares \[3, 1, 1\] for 2"),
        ((0, 0), r"found shares \[0, 0\]"),
        ((0.5, 1), "whole number from 0, found 0.5"),
        ((True, 1), "whole number from 0, found True"),
        ((3j, 1), r'found 3j in shares \["3j", 1\]'),
    ],
)
def test_a_stage_refuses_shares_that_nothing_can_be_dealt_by(shares, said):
    stage = partition(NET, replicas=[2, 1], codec="raw").stages[0]
    with pytest.raises(PlanError, match=said):
        dataclasses.replace(stage, shares=shares)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replicas": 2, "shares": [1, 1]}, "found 2 shares for 4 ranks"),
        ({"replicas": 2, "shares": [1, 1, 0, 0]}, r"found shares \[0, 0\] of stage 1"),
        ({"replicas": 2, "shares": 3}, "one for each rank, found 3"),
        ({"shares": [1, 1]}, "shares are for stages whose replicas are known"),
    ],
)
def test_partition_refuses_them_by_stage(options, said):
    with pytest.raises(PlanError, match=said):
        partition(NET, stages=2, codec="raw", **options)


def test_shares_of_other_stages_than_a_plan_has_are_refused():
    with pytest.raises(PlanError, match="found shares of 1 stages for 2"):
        partition(NET, replicas=[2, 2], codec="raw").with_shares([(1, 1)])
    assert split_shares([1, 3, 2], [(0, 2), (1,)]) == ((1, 2), ())


def test_memory_counts_what_the_fullest_replica_has_in_flight_and_keeps():
    plan = {"replicas": [2, 2], "exact": True, "micro_batches": 8, "codec": "raw", "cuts": ["conv1"]}
    even, odd = (partition(NET, **plan, shares=shares) for shares in ((), [7, 1, 1, 1]))
    assert odd.stages[0].memory_bytes > even.stages[0].memory_bytes
