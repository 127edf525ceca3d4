"""Layers on their stages: what training writes is read where it is written, and who waits hears the walk."""

from itertools import pairwise

import pytest
import torch
from cases import Case, pipeline_with_batches
from small_pipelines import model_of, pipeline_of
from torch import nn

import penstock


def scaled(self, x):
    x = self.one(x)
    if self.training:
        self.scale.mul_(0.9)
        x = x * self.scale.clone()
    x = self.two(x)
    return x if self.training else x * self.scale


def returned(self, x):
    x = self.one(x)
    if self.training:
        self.scale.mul_(0.9)
        x = x * self.scale.clone()
    return self.two(x) if self.training else (self.two(x), self.scale)


def swapped(self, x):
    return self.two(self.one(x)) if self.training else self.one(self.two(x))


@pytest.mark.parametrize(
    ("forward", "said"), [(scaled, "layer mul"), (returned, "the output, scale,"), (swapped, "layer one")]
)
def test_an_evaluation_that_needs_what_an_earlier_stage_holds_is_refused(forward, said):
    model = model_of(forward, one=nn.Linear(4, 4), two=nn.Linear(4, 4))
    model.register_buffer("scale", torch.ones(4))
    x = torch.randn(3, 4)
    cut = "one" if forward is swapped else "mul_1"
    pipe = pipeline_of(model, cuts=[cut], example=(x,), loss=nn.functional.mse_loss)
    pipe.step(x, torch.zeros(3, 4))
    with pytest.raises(penstock.PlanError, match=f"{said}.*needs what stage 0 holds.*cut elsewhere"):
        pipe.evaluate(x)


@pytest.mark.parametrize("tier", [pytest.param("device", marks=pytest.mark.slow), "packed"])
def test_every_layer_is_told_when_it_is_done_and_which_comes_next(tier):
    case = Case(model="resnet18", cuts=["relu", "layer1_0_relu_1"], tier=tier, micro_batches=2, steps=1)
    pipe, batches = pipeline_with_batches(case)
    told = {index: [] for index in pipe.stages}
    with pytest.MonkeyPatch.context() as patch:
        for index, stage in pipe.stages.items():

            def listen(done, following, *, index=index):
                told[index].append((done, following))

            patch.setattr(stage, "observers", (*stage.observers, listen))
        pipe.step(*batches[0])
        routes = pipe.meter.step.messages.routes[0]
        wanted = {
            index: list(pairwise([None, *(visit.layer for visit in routes[index].visits), None]))
            for index in pipe.stages
        }
        before = {index: list(calls) for index, calls in told.items()}
        pipe.evaluate(batches[0][0])
    assert told == before == {index: calls * case.micro_batches for index, calls in wanted.items()}
    pipe.close()
