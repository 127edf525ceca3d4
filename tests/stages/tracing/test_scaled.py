"""Records of real runs at a few sizes, and what they tell of others."""

import copy

import pytest
import torch
from torch import nn

import penstock
from penstock.compression.errors import PlanError
from penstock.stages.tracing.scaled import scaled


class Net(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.linear, self.sizes = nn.Linear(6, 3), sizes

    def forward(self, x):
        rows = torch.ones(self.sizes(len(x)))
        return self.linear(x) * torch.relu(rows).mean()


def records(sizes):
    model, example = Net(sizes), (torch.randn(4, 6),)
    return scaled(penstock.trace(model, example).train, lambda: copy.deepcopy(model), example)


def test_a_size_that_follows_the_samples_is_told():
    at_seven = records(lambda samples: 3 * samples + 1).at(7)
    assert (at_seven.samples, at_seven.values[1].name, at_seven.values[1].shape) == (7, "ones", (22,))


def test_a_size_that_follows_no_rule_is_told_where_it_ran_alone():
    told = records(lambda samples: samples**2)
    assert told.at(9).values[1].shape == (81,)
    with pytest.raises(PlanError, match="the shape of ones follows no rule"):
        told.at(7)
