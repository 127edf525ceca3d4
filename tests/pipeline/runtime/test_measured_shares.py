"""Shares from step to step without ranks: who slows down gets less, and noise moves nothing."""

import copy
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import NET
from small_pipelines import profile_of
from torch import nn

import penstock
from penstock.pipeline.partition.partition import partition
from penstock.pipeline.runtime.load_balancing import LoadBalancer, better, by_speed, check_asked, smoothed
from penstock.stages.plan.plan_stage import counts_of

EVEN = partition(NET, replicas=[2, 2], micro_batches=8, codec="raw")


def measured():
    return LoadBalancer(follows=True)


def after(balancer, plan, seconds, number=8):
    """The plan behind a step in which each rank took so long for a micro-batch."""
    counts = [n for own in plan.shares for n in counts_of(own, number)]
    worked = [n * one for n, one in zip(counts, seconds, strict=True)]
    return balancer.after(plan, number=number, seconds=worked)


@pytest.mark.parametrize(("slower", "shares"), [(1.5, (5, 3)), (2, (5, 3)), (4, (6, 2)), (8, (7, 1))])
def test_a_rank_that_slows_down_gets_less_within_ten_steps_and_again_as_much(slower, shares):
    balancer, noise = measured(), random.Random(0)
    plan = balancer.begin(EVEN)
    for _ in range(20):
        plan = after(balancer, plan, [noise.uniform(0.98, 1.02) for _ in range(4)])
    assert plan is EVEN
    for _ in range(10):
        plan = after(balancer, plan, [1, 1, 1, slower])
    assert plan.shares == ((1, 1), shares)
    for _ in range(12):
        plan = after(balancer, plan, [1, 1, 1, 1])
    assert plan == EVEN


def test_the_first_step_counts_for_nothing_and_a_batch_of_fewer_micro_batches_as_it_is():
    balancer = measured()
    plan = balancer.begin(EVEN)
    assert after(balancer, plan, [1, 1, 1, 50]) is plan
    assert after(balancer, plan, [1, 1, 1, 1]) is plan
    for _ in range(5):
        assert after(balancer, plan, [1, 1, 1, 1], number=3) is plan


def test_who_had_nothing_gets_one_and_is_seen():
    plan = EVEN.with_shares([(1, 0), ()])
    balancer = measured()
    plan = balancer.begin(plan)
    for _ in range(2):
        plan = after(balancer, plan, [1, 1, 1, 1])
    assert plan.shares == ((1, 1), (1, 1))


def test_a_checkpoint_is_taken_up_by_as_many_replicas_and_else_left():
    kept = ((5, 3), (1, 1))
    assert measured().begin(EVEN, kept).shares == kept
    assert measured().begin(EVEN, ((5, 3), (1,))) is EVEN
    assert measured().begin(EVEN, ((8,),)) is EVEN
    assert LoadBalancer(follows=False).begin(EVEN, kept) is EVEN


def test_seconds_go_on_with_a_checkpoint_of_as_many_replicas():
    whole, parted = measured(), measured()
    plan = again = parted.begin(whole.begin(EVEN))
    for step, slower in enumerate([1, 1, 1, 2, 2, 2, 2]):
        plan = after(whole, plan, [1, 1, 1, slower])
        if step == 4:
            parted, kept = measured(), (again.shares, parted.seconds)
            again = parted.begin(EVEN, *kept)
            after(parted, again, [9, 9, 9, 9])  # the first step counts for nothing
        again = after(parted, again, [1, 1, 1, slower])
        assert (again.shares, parted.seconds) == (plan.shares, whole.seconds), step
    assert measured().begin(EVEN, ((8,),), parted.seconds) is EVEN
    assert plan.shares[1] != (1, 1)
    fewer = measured()
    fewer.begin(EVEN, ((8,),), parted.seconds)
    assert fewer.seconds == {}


def test_a_checkpoint_has_the_shares_and_seconds_in_its_index(tmp_path):
    model, x = nn.Linear(6, 8), torch.randn(16, 6)
    plan = partition(profile_of(model, (x[:4],)), stages=1, replicas=2, micro_batches=4)
    models = [[copy.deepcopy(model) for _ in range(2)] for _ in range(3)]

    def train(world):
        settings: dict[str, Any] = {"loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD}
        plans = plan.with_shares([(3, 1)]), plan, plan
        ways = zip(models, plans, ("measured", "measured", None), strict=True)
        pipes = [
            penstock.Pipeline(some[world.rank], one, world=world, shares=shares, **settings)
            for some, one, shares in ways
        ]
        pipes[0].step(x, torch.zeros(16, 8))  # the first, behind which shares stay
        pipes[0].load_balancer.seconds = {0: 1.0, 1: 3.0}
        penstock.save(pipes[0], tmp_path)
        for pipe in pipes[1:]:
            penstock.load(pipe, tmp_path)
        return [(pipe.plan.shares, pipe.load_balancer.seconds) for pipe in pipes]

    for saved, loaded, even in penstock.in_threads(train, ranks=2, deadline=30):
        assert saved == loaded == (((3, 1),), {0: 1.0, 1: 3.0})
        assert even[0] == ((1, 1),)


@pytest.mark.parametrize(
    ("asked", "plan", "message"),
    [
        ("fast", EVEN, "found 'fast'"),
        ([(0, [[1, 1], [1, 1]])], EVEN, r"found \[\(0, .* shares=\[3, 1\]"),
        ({1}, EVEN, r"found \{1\}"),
        ("measured", partition(NET, stages=2, codec="raw"), "the plan has one rank a stage"),
    ],
)
def test_what_means_nothing_is_refused(asked, plan, message):
    with pytest.raises(penstock.PlanError, match=message):
        check_asked(asked, plan)


SECONDS = st.lists(st.floats(0.001, 1000), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("seconds", "number", "counts"),
    [
        ((1, 2), 8, (5, 3)),
        ((1, 8), 9, (8, 1)),
        ((1, 100), 8, (7, 1)),  # or nobody would see it become faster
        ((1, 1, 2), 1, (1, 0, 0)),
        ((2, 1, 1), 8, (2, 3, 3)),
        ((1, 1, 1), 8, (3, 3, 2)),
    ],
)
def test_literals(seconds, number, counts):
    assert by_speed(seconds, number) == counts


@given(SECONDS, st.integers(1, 64))
def test_all_are_dealt_nobody_who_is_faster_gets_less_and_nobody_is_far_from_what_is_due(seconds, number):
    counts, total = by_speed(seconds, number), sum(1 / one for one in seconds)
    assert sum(counts) == number
    assert min(counts) >= (number >= len(seconds))
    for mine, ours in zip(seconds, counts, strict=True):
        for theirs, other in zip(seconds, counts, strict=True):
            assert mine > theirs or ours >= other - (mine == theirs)
    due = [number / one / total for one in seconds]
    if min(due) >= 1:
        assert all(abs(count - one) < 1 + 1e-9 for count, one in zip(counts, due, strict=True))


def test_shares_change_only_where_the_slowest_gains_five_percent():
    assert better((4, 4), (1.0, 1.0)) is None
    assert better((4, 4), (1.0, 1.31)) is None  # 5 against 5.24
    assert better((4, 4), (1.0, 1.32)) == (5, 3)  # 5 against 5.28
    assert better((5, 3), (1.0, 1.0)) == (4, 4)
    assert better((1, 7), (2.0, 1.0)) == (3, 5)


@given(SECONDS.filter(lambda seconds: len(seconds) > 1), st.integers(2, 64))
def test_what_was_taken_up_stays(seconds, number):
    assert better(by_speed(seconds, number), seconds) is None


def test_seconds_follow_what_lasts():
    found = 0.0
    for _ in range(3):
        found = smoothed(found, 1.0)
    assert found == 1.0
    assert smoothed(found, 11.0) == pytest.approx(4.0)
    for _ in range(2):
        found = smoothed(found, 2.0)
    assert found > 1.5
