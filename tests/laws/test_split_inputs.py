"""Inputs that come split, each micro-batch where it is read alone: the plain loop's bits."""

import copy

import pytest
import torch
from cases import refusal_of
from law import split_for
from reference import same_bits
from small_pipelines import pipeline_of
from torch import nn

import penstock


def pipeline(model, x, **options):
    options |= {"codec": "raw", "loss": nn.functional.mse_loss, "optimizer": torch.optim.SGD}
    return pipeline_of(model, example=(x[:2],), **options)


@pytest.mark.parametrize("samples", [9, 7, 2])
def test_a_split_batch_is_the_batch(samples):
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), *torch.randn(2, samples, 6)
    other = copy.deepcopy(model)
    whole, split = pipeline(model, x, stages=2), pipeline(other, x, stages=2)
    for _ in range(2):
        found = split.step(split_for(split, x), y[:, :2])
        assert (found.loss, found.num_samples) == (whole.step(x, y[:, :2]).loss, samples)
    assert all(map(same_bits, model.parameters(), other.parameters()))


@pytest.mark.parametrize("sizes", [(4, 1, 2), (6, 1), (7,)])
def test_parts_of_any_size_are_the_micro_batches(sizes):
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)), *torch.randn(2, 7, 6)
    plain, parts = copy.deepcopy(model), list(zip(x.split(sizes), y[:, :2].split(sizes), strict=True))
    pipe = pipeline(model, x, stages=2, weight="summed")
    losses = [nn.functional.mse_loss(plain(part.clone()), target.clone()) for part, target in parts]
    for loss in losses:
        loss.backward()
    torch.optim.SGD(plain.parameters()).step()
    report = pipe.step(penstock.Split(tuple(part for part, _ in parts)), y[:, :2])
    assert report.loss == pytest.approx(sum(loss.item() for loss in losses))
    assert all(map(same_bits, model.parameters(), plain.parameters()))


X, Y = torch.ones(7, 6), torch.ones(7, 2)
META = X.to("meta")


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ((X[:2], X[2:4], X[4:5], X[5:]), r"at most plan\.micro_batches=3 .*, found 2, 2, 1, 2; make"),
        ((X[:4], X[4:], X[:0]), r"micro-batches of a sample or more, found 4, 3, 0"),
        ((X[:3], X[3:5]), r"the same number of samples, one or more, found \(2, 6\), \(3, 6\), \(7, 2\)"),
        ((), r"penstock\.Split has the inputs of every micro-batch, found none"),
        ((X[:3], META[3:5], X[5:]), r"are read on this rank, found some on the meta device; ask pipe\.reads"),
    ],
)
def test_a_split_that_does_not_suit_is_refused(parts, told):
    pipe = pipeline(nn.Linear(6, 2), X, stages=1)
    with pytest.raises(penstock.PlanError, match=told):
        pipe.step(penstock.Split(parts), Y)


def different(plan):
    """On a rank: what is said where a micro-batch is not the same on two ranks that have it."""
    torch.manual_seed(0)
    pipe = penstock.Pipeline(nn.Linear(6, 2), plan, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD)
    parts = list((X + pipe.rank).tensor_split(3))
    parts[0] = X[:3]
    return refusal_of(pipe.step, penstock.Split(tuple(parts)), Y)


def test_two_that_have_one_micro_batch_must_have_the_same(ranks):
    torch.manual_seed(0)
    plan = pipeline(nn.Linear(6, 2), X, stages=1, replicas=2).plan
    for told in ranks.run(different, plan, ranks=2):
        assert "the checksum of the input input of micro-batch 1 of the batch is" in told
