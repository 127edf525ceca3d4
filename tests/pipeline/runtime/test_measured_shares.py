"""Shares from step to step without ranks: who slows down gets less, and noise moves nothing."""

import copy
import random

import pytest
import torch
from profiles import NET
from small_pipelines import profile_of
from torch import nn

import penstock
from penstock.compression.errors import PlanError
from penstock.pipeline.partition.partition import partition
from penstock.pipeline.runtime.load_balancing import Measured, Planned, sharing_of
from penstock.stages.plan.plan_stage import counts_of

EVEN = partition(NET, replicas=[2, 2], micro_batches=8, codec="raw")


def after(sharing, plan, seconds, step=0, number=8):
    """The plan behind a step in which each rank took so long for a micro-batch."""
    counts = [n for own in plan.shares for n in counts_of(own, number)]
    worked = [n * one for n, one in zip(counts, seconds, strict=True)]
    return sharing.after(plan, step, number=number, seconds=worked)


@pytest.mark.parametrize(("slower", "shares"), [(1.5, (5, 3)), (2, (5, 3)), (4, (6, 2)), (8, (7, 1))])
def test_a_rank_that_slows_down_gets_less_within_ten_steps_and_again_as_much(slower, shares):
    sharing, noise = Measured(), random.Random(0)
    plan = sharing.begin(EVEN, 0, ())
    for step in range(20):
        plan = after(sharing, plan, [noise.uniform(0.98, 1.02) for _ in range(4)], step)
    assert plan is EVEN
    for step in range(10):
        plan = after(sharing, plan, [1, 1, 1, slower], step)
    assert plan.shares == ((1, 1), shares)
    for step in range(12):
        plan = after(sharing, plan, [1, 1, 1, 1], step)
    assert plan == EVEN


def test_the_first_step_counts_for_nothing_and_a_batch_of_fewer_micro_batches_as_it_is():
    sharing = Measured()
    plan = sharing.begin(EVEN, 0, ())
    assert after(sharing, plan, [1, 1, 1, 50]) is plan
    assert after(sharing, plan, [1, 1, 1, 1]) is plan
    for _ in range(5):
        assert after(sharing, plan, [1, 1, 1, 1], number=3) is plan


def test_who_had_nothing_gets_one_and_is_seen():
    plan = EVEN.with_shares([(1, 0), ()])
    sharing = Measured()
    plan = sharing.begin(plan, 0, ())
    for _ in range(2):
        plan = after(sharing, plan, [1, 1, 1, 1])
    assert plan.shares == ((1, 1), (1, 1))


def test_a_checkpoint_is_taken_up_by_as_many_replicas_and_else_left():
    kept = ((5, 3), (1, 1))
    assert Measured().begin(EVEN, 7, kept).shares == kept
    assert Measured().begin(EVEN, 7, ((5, 3), (1,))) is EVEN
    assert Measured().begin(EVEN, 7, ((8,),)) is EVEN
    assert Planned().begin(EVEN, 7, kept) is EVEN


def test_seconds_go_on_with_a_checkpoint_of_as_many_replicas():
    whole, parted = Measured(), Measured()
    plan = again = parted.begin(whole.begin(EVEN, 0, ()), 0, ())
    for step, slower in enumerate([1, 1, 1, 2, 2, 2, 2]):
        plan = after(whole, plan, [1, 1, 1, slower], step)
        if step == 4:
            parted, kept = Measured(), (again.shares, parted.known())
            again = parted.begin(EVEN, step, *kept)
            after(parted, again, [9, 9, 9, 9], step)  # the first step counts for nothing
        again = after(parted, again, [1, 1, 1, slower], step)
        assert (again.shares, parted.known()) == (plan.shares, whole.known()), step
    assert Measured().begin(EVEN, 7, ((8,),), parted.known()) is EVEN
    assert plan.shares[1] != (1, 1)
    fewer = Measured()
    fewer.begin(EVEN, 7, ((8,),), parted.known())
    assert fewer.known() == {}


def test_a_checkpoint_has_the_seconds_in_its_index(tmp_path):
    model, x = nn.Linear(6, 8), torch.randn(16, 6)
    plan = partition(profile_of(model, (x[:4],)), stages=1, replicas=2, micro_batches=4)
    models = [[copy.deepcopy(model) for _ in range(2)] for _ in range(2)]

    def train(world):
        settings = {"loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD, "shares": "measured"}
        pipes = [penstock.Pipeline(some[world.rank], plan, world=world, **settings) for some in models]
        for _ in range(3):
            pipes[0].step(x, torch.zeros(16, 8))
        penstock.save(pipes[0], tmp_path)
        penstock.load(pipes[1], tmp_path)
        return [pipe.sharing.known() for pipe in pipes]

    for first, second in penstock.in_threads(train, ranks=2, deadline=30):
        assert first == second
        assert sorted(first) == [0, 1]


def test_one_process_has_the_plan_and_what_means_nothing_is_refused():
    assert isinstance(sharing_of("measured", EVEN, alone=True), Planned)
    assert isinstance(sharing_of(None, EVEN, alone=False), Planned)
    assert isinstance(sharing_of("measured", EVEN, alone=False), Measured)
    one_rank_a_stage = partition(NET, stages=2, codec="raw")
    for asked, plan, said in [
        ("fast", EVEN, "found 'fast'"),
        ([(0, [[1, 1], [1, 1]])], EVEN, r"found \[\(0, .* shares=\[3, 1\]"),
        ({1}, EVEN, r"found \{1\}"),
        ("measured", one_rank_a_stage, "the plan has one rank a stage"),
    ]:
        with pytest.raises(PlanError, match=said):
            sharing_of(asked, plan, alone=False)
