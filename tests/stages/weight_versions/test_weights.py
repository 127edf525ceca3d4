"""Versions of the weights in a hand-driven chain: what is read when, and what is refused."""

import contextlib
from typing import Any

import pytest
import torch
from chain import ASYNCHRONOUS, BATCHES, MICRO_BATCHES, NUM_STAGES, Chain, batches_of
from torch import nn

from penstock import PlanError
from penstock.compression.errors import StageError
from penstock.stages.memory import saved_tensor_hooks
from penstock.stages.weight_versions.policies import policy_named
from penstock.stages.weight_versions.versions import WeightVersions, versions_of


def test_memory_that_a_parameter_has_left_is_not_taken_for_a_parameter():
    parameter = nn.Parameter(torch.ones(64))
    weights = saved_tensor_hooks.ParameterFilter([parameter])
    number = parameter.untyped_storage()._cdata
    parameter.data = torch.zeros(64)
    made = [torch.ones(64) for _ in range(1000)]
    assert number not in {tensor.untyped_storage()._cdata for tensor in made}
    assert not any(weights.holds(tensor) for tensor in made)
    assert weights.holds(parameter)
    assert weights.holds(parameter.view(8, 8).t())


@pytest.mark.parametrize(("policy", "prediction"), ASYNCHRONOUS)
@pytest.mark.parametrize("tier", ["device", "disk"])
def test_a_parameter_is_sent_as_a_copy_made_in_the_block(policy, prediction, tier):
    sent = {}

    class Sends:
        def __init__(self, weights, stage):
            self.weights, self.stage = weights, stage

        def __getattr__(self, name):
            return getattr(self.weights, name)

        @contextlib.contextmanager
        def forward(self, micro_batch, batch):
            with self.weights.forward(micro_batch, batch):
                parameter = self.weights.parameters[0]
                sent[self.stage, micro_batch] = parameter.detach().clone(), parameter.tolist()
                yield

    Chain(policy, prediction=prediction, tier=tier, wrap=Sends).run(batches_of())
    assert len(sent) == BATCHES * MICRO_BATCHES * NUM_STAGES
    assert all(tensor.tolist() == values for tensor, values in sent.values())


class Buggy:
    """The weights of stage 1 with one planted mistake."""

    def __init__(self, weights, stage, *, bug):
        self.weights, self.bug = weights, bug if stage == 1 else ""
        if self.bug == "update in place":
            weights._needed = lambda version, newest: False

    def __getattr__(self, name):
        return getattr(self.weights, name)

    def backward(self, micro_batch):
        if self.bug == "freed early" and micro_batch == 6:
            self.weights.done(micro_batch)
        return self.weights.backward(micro_batch)


@pytest.mark.parametrize("bug", ["freed early", "update in place"])
@pytest.mark.parametrize("policy", ["stashed", "vertical_sync", "double_buffered"])
def test_a_version_that_is_gone_is_refused(policy, bug):
    with pytest.raises((StageError, ValueError), match=r"weights|shorter"):
        Chain(policy, wrap=lambda *of: Buggy(*of, bug=bug)).run(batches_of())


def named(policy, parameters, **settings: Any):
    value = policy_named(policy, **{"schedule": "async_1f1b", **settings})
    return versions_of(value, parameters, stage=0, num_stages=3)


def test_a_flush_needs_no_versions_and_no_parameter_has_two_places():
    assert type(named("latest", nn.Linear(2, 2).parameters(), schedule="gpipe")) is WeightVersions
    with pytest.raises(PlanError, match="2 in 1 places"):
        named("stashed", [nn.Parameter(torch.ones(2))] * 2)


@pytest.mark.parametrize("policy", ["latest", "stashed"])
def test_prediction_refuses_optimizers_that_it_does_not_know(policy):
    layer = nn.Linear(2, 2)
    weights = named(policy, layer.parameters(), prediction=True)
    for optimizer, said in (
        (torch.optim.RMSprop(layer.parameters()), "SGD, Adam, AdamW, found RMSprop"),
        (torch.optim.SGD(layer.parameters()), "momentum=0"),
    ):
        with pytest.raises(PlanError, match=said):
            weights.bind(optimizer)
    with weights.forward(0, 0):  # the first forward is on time
        pass
    with pytest.raises(StageError, match="bind one"), weights.forward(1, 0):
        pass
