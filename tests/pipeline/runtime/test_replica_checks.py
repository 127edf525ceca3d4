"""Models that replicas would train otherwise than one rank are refused by name."""

import copy

import pytest
import torch
from small_pipelines import model_of, profile_of
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.pipeline.runtime.replicas import check_replicated


class Own(nn.Module):
    def __init__(self, norm, what):
        super().__init__()
        self.first, self.norm, self.what = nn.Linear(6, 8), norm, what

    def forward(self, x):
        return self.what(self.norm, self.first(x))


class Normed(nn.BatchNorm1d):
    pass


def check(model):
    plan, model, x = planned(model)
    check_replicated(plan, model, penstock.trace(model, (x[:3],)))


@pytest.mark.parametrize(
    ("norm", "what"),
    [
        (nn.BatchNorm1d, lambda norm, x: norm(x) + norm.running_mean),
        (nn.BatchNorm1d, lambda norm, x: norm(x - norm.running_mean)),
        (nn.BatchNorm1d, lambda norm, x: F.batch_norm(x, norm.running_mean, norm.running_var, training=True)),
        (Normed, lambda norm, x: norm(x)),
    ],
)
def test_statistics_that_a_forward_uses_by_itself_are_refused(norm, what):
    with pytest.raises(penstock.PlanError, match=r"a forward that uses norm\.\w+ by itself"):
        check(Own(norm(8), what))


def test_statistics_that_are_only_read_where_nobody_writes_them_are_as_good_as_any_buffer():
    check(Own(nn.BatchNorm1d(8).eval(), lambda norm, x: norm(x) + norm.running_mean))


@pytest.mark.parametrize("exact", [False, True])
def test_gradients_of_two_parameters_in_one_memory_are_refused(exact):
    def forward(self, x):
        return self.first(x) * (self.p.view(8) + self.q.view(8))  # autograd gives both the same gradient

    p, q = (nn.Parameter(torch.ones(shape)) for shape in ((2, 4), (4, 2)))
    with pytest.raises(penstock.StageError, match=r"gave p and q one tensor for both.*q\.clone\(\)"):
        trained(model_of(forward, first=nn.Linear(6, 8), p=p, q=q), exact=exact)


@pytest.mark.parametrize(("exact", "later"), [(False, True), (True, False)])
def test_a_parameter_that_some_replicas_froze_is_refused(exact, later):
    def freeze(rank, step, model):
        model.first.weight.requires_grad_(rank == 0 or step < later)

    with pytest.raises(penstock.PenstockError, match=r"first\.weight of stage 0 requires a gradient on some"):
        trained(Own(nn.Tanh(), lambda norm, x: norm(x)), exact=exact, before=freeze)


@pytest.mark.parametrize(("exact", "sharded"), [(False, False), (False, True), (True, True)])
def test_frozen_parameters_of_eight_bits_are_left_where_they_are(exact, sharded):
    model = Own(nn.Tanh(), lambda norm, x: norm(x) * norm.scale.float())
    model.norm.scale = nn.Parameter(torch.rand(8).to(torch.float8_e4m3fn), requires_grad=False)
    assert trained(model, exact=exact, sharded=sharded) == [2, 2]


def test_more_replicas_than_could_ever_be_are_refused_before_they_are_listed():
    with pytest.raises(penstock.PlanError, match="found 1000000000000 replicas and micro_batches=4"):
        planned(nn.Linear(6, 8), replicas=10**12)


def planned(model, **options):
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    options = {"replicas": 2, **options}
    return penstock.partition(profile_of(model, (x[:3],)), stages=1, micro_batches=4, **options), model, x


def trained(model, *, before=lambda rank, step, model: None, **options):
    """Number of steps that each of two threads was trained."""
    plan, _, x = planned(model, **options)
    models = [copy.deepcopy(model) for _ in range(2)]

    def train(world):
        pipe = penstock.Pipeline(
            models[world.rank], plan, loss=F.mse_loss, optimizer=torch.optim.SGD, world=world, deadline=30
        )
        for step in range(2):
            before(world.rank, step, models[world.rank])
            pipe.step(x, torch.zeros(12, 8))
        pipe.close()
        return pipe.num_steps

    return penstock.in_threads(train, ranks=2, deadline=30)
