"""The update: rounds of all stages, steps of one stage, what a clip and an overflow reach, and refusals."""

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from cases import OPTIMIZERS, Case, plan_of
from torch import nn
from zoo import build, cross_entropy

import penstock
from penstock.pipeline.distributed.process_group import World
from penstock.pipeline.optimizer.update import Update


class Log:
    """A policy of the weights that writes down what is asked of it, and hands out gradients."""

    num_live, num_bytes = 1, 0

    def __init__(self, log, stage, parameters, gradients):
        self.log, self.stage = log, stage
        self.parameters, self.gradients = parameters, list(gradients)

    def bind(self, optimizer):
        self.log.append(f"bind {self.stage}")

    def due(self):
        self.log.append(f"due {self.stage}")
        gradient = self.gradients.pop(0)
        for parameter in self.parameters:
            parameter.grad = gradient.clone()

    @contextlib.contextmanager
    def update(self):
        self.log.append(f"update {self.stage}")
        yield
        self.log.append(f"updated {self.stage}")


def made(gradients, **settings):
    """An Update of two stages with one parameter each, its log, and what its SGD of rate 1 wrote."""
    log, parameters = [], [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    weights: Any = {s: Log(log, s, parameters[s : s + 1], gradients[s]) for s in range(2)}
    settings = {"clip": None, "scheduler": None, **settings}
    update = Update(
        world=World.alone(),
        parameters={s: [(f"p{s}", parameters[s])] for s in range(2)},
        owner={f"p{s}": 0 for s in range(2)},
        every=[(f"p{s}", parameters[s]) for s in range(2)],
        weights=weights,
        optimizer=lambda named: torch.optim.SGD(named, lr=1.0),
        **settings,
    )
    return update, log, parameters


def written(parameters):
    return [parameter.item() for parameter in parameters]


def of(*values):
    return [torch.tensor([float(value)]) for value in values]


def test_the_first_update_of_a_round_finds_the_gradients_of_all_stages():
    update, log, _ = made([of(3, 30), of(4, 40)], clip=0.5)
    for stage in (0, 1, 1, 0):  # another stage opens the second round
        update.step(stage)
    assert log == [
        *("bind 0", "bind 1", "due 0", "due 1", "update 0", "updated 0", "update 1", "updated 1"),
        *("due 0", "due 1", "update 1", "updated 1", "update 0", "updated 0"),
    ]


@pytest.mark.parametrize(("together", "expected"), [(True, [-2.0, -2.0]), (False, [-3.0, -2.0])])
def test_an_overflow_skips_its_round_or_its_own_update(together, expected):
    update, log, parameters = made(
        [of(4, 8), of(float("inf"), 8)],
        scaler=4.0,
        together=together,
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=1.0),
    )
    ticks = []
    for _ in range(2):
        for stage in (0, 1):
            update.step(stage)
        assert update.scheduler is not None
        ticks.append([*update.scheduler.num_steps.values()])
    assert ticks == ([[0, 0], [1, 1]] if together else [[1, 0], [2, 1]])
    assert log.count("update 1") == 2  # it counts as an update of the versions
    assert written(parameters) == expected


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"clip": 1.0}, "no moment at which all stages hold the same step; take clip_scope=stage"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "give scaler a number, such as 1024"),
        ({"clip": 1.0, "clip_scope": "rank"}, "clip_scope is one of global, stage, found 'rank'"),
        ({"clip": 1.0, "clip_scope": "stage", "scaler": 2.0}, ""),
        ({"scaler": torch.amp.GradScaler("cpu", enabled=False)}, ""),
    ],
)
def test_without_a_flush_nothing_is_asked_of_all_stages_at_once(given, told):
    plan, _ = plan_of(Case(model="mlp", cuts=3))
    plan = dataclasses.replace(plan, schedule="async_1f1b", weights="stashed")
    model, _ = build("mlp")
    refused = pytest.raises(penstock.PlanError, match=told) if told else contextlib.nullcontext()
    with refused:
        penstock.Pipeline(model, plan, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"], **given)
