"""Ranks that stopped in a step refuse another, and a loss keeps parameters of its own."""

import gc

import pytest
import torch
from cases import OPTIMIZERS, Case, pipeline_with_batches, plan_of, refusal_of
from torch import nn
from zoo import build, cross_entropy

import penstock

CASE = Case(model="mlp", cuts=2, deadline=4)


def steps_after_a_failure(plan):
    """The loss fails on rank 1 in the first step; what a second step then says."""
    pipe, ((x, y), *_) = pipeline_with_batches(CASE, plan)
    said = [refusal_of(pipe.step, x, targets) for targets in (y + 10, y)]
    pipe.close()  # waits for nobody
    raise RuntimeError(" / ".join(said))  # this group cannot be left as after success


@pytest.mark.slow
def test_ranks_that_stopped_in_a_step_refuse_another(ranks):
    texts = [text for text, _ in ranks.try_run(steps_after_a_failure, plan_of(CASE)[0], ranks=2)]
    assert "StageError: rank 1, stage 1, forward of micro-batch 0, step 0: the loss: IndexError" in texts[1]
    for text in texts:
        assert " / TransportError: these ranks stopped in the middle of a step" in text


def step_with_a_loss_that_trains(plan):
    """The loss has a parameter of its own, made where one of the model was that another rank trains."""
    (model, batches), own = build(CASE.model), []
    pipe = penstock.Pipeline(
        model,
        plan,
        loss=lambda outputs, targets: cross_entropy(outputs, targets) + own[-1].square(),
        optimizer=OPTIMIZERS["sgd"],
        deadline=20,
    )
    gone = {id(parameter) for parameter in model.parameters()}
    del model
    gc.collect()
    while not own or (id(own[-1]) not in gone and len(own) < 10_000):
        own.append(nn.Parameter(torch.ones(())))
    pipe.step(*batches[0])
    return id(own[-1]) in gone


def test_a_loss_keeps_its_parameters_where_some_of_the_model_were(ranks):
    assert ranks.run(step_with_a_loss_that_trains, plan_of(CASE)[0], ranks=2)[1]
