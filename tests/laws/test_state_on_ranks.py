"""Ranks that stopped in a step refuse another, and a loss keeps parameters of its own."""

import gc

import torch
from cases import OPTIMIZERS, Case, plan_of
from torch import nn
from zoo import build, cross_entropy

import penstock

CASE = Case(model="mlp", cuts=2, deadline=4)


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
