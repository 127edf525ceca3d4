"""Stages of the layers of an evaluation: what training writes is read where it is written, or not at all."""

import pytest
import torch
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
