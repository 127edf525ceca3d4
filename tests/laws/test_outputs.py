"""Outputs that are no rows of samples: numbers follow the size of a micro-batch, the rest is stacked."""

import pytest
import torch
from cases import OPTIMIZERS
from small_pipelines import batch, built, pipeline_of
from torch import nn
from zoo import cross_entropy


class Counts(nn.Module):
    """Returns rows, numbers that follow the size, a sum over samples and a mean."""

    def __init__(self):
        super().__init__()
        self.first, self.end = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x):
        y = self.end(self.first(x).tanh())
        return {"y": y, "n": x.shape[0], "list": [2 * len(y) + 1], "sum": y.sum(0), "mean": y.mean()}


@pytest.mark.parametrize("cuts", [None, ["first"]])
@pytest.mark.parametrize("samples", [3, 9, 11])
def test_numbers_are_those_of_each_micro_batch_and_of_each_evaluation(samples, cuts):
    seen = []

    def loss(outputs, targets):
        seen.append((outputs["n"], outputs["list"]))
        return cross_entropy(outputs["y"], targets)

    model, (x, y) = built(Counts), batch(samples)
    pipe = pipeline_of(model, cuts=cuts, stages=1 if cuts is None else 2, loss=loss)
    pipe.step(x, y)
    sizes = [len(part) for part in x.tensor_split(3)]
    assert seen == [(size, [2 * size + 1]) for size in sizes]
    tested = pipe.evaluate(x)
    assert (tested["n"], tested["list"]) == (samples, [2 * samples + 1])


@pytest.mark.parametrize("samples", [9, 11])
def test_what_has_no_rows_is_there_for_each_micro_batch(samples):
    model, (x, y) = built(Counts), batch(samples)
    parts = [model(part.clone()) for part in x.tensor_split(3)]
    pipe = pipeline_of(
        model, stages=1, loss=lambda o, t: cross_entropy(o["y"], t), optimizer=OPTIMIZERS["sgd"]
    )
    found = pipe.step(x, y, outputs=True).outputs
    if samples == 11:  # other sizes have other numbers
        assert [one["n"] for one in found] == [4, 4, 3]
        return
    assert found["n"] == 3
    for name, join in (("y", torch.cat), ("sum", torch.stack), ("mean", torch.stack)):
        assert torch.equal(found[name], join([part[name] for part in parts])), name
