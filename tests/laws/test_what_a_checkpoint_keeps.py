"""Law L6 for state that no state_dict has, or that a file says badly, on another cut than it was saved on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensors import assert_same
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers

import penstock
from penstock.compression.errors import PlanError
from penstock.pipeline.pipeline import Pipeline

STEPS, SAVED = 6, 3


def batches() -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=made), torch.randn(8, 3, generator=made)) for _ in range(STEPS)]


class Mean(nn.Module):
    """A running mean that its state_dict leaves out."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        if self.training:
            self.mean.mul_(0.9).add_(h.detach().mean(0))
        return self.second(h - self.mean)


class Odd(nn.Module):
    """Buffers of every shape that a file may stumble over."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        for name, tensor in {
            "repeated": torch.ones(1).expand(5),
            "empty": torch.zeros(0, 3),
            "number": torch.tensor(7),
            "float8": torch.ones(3).to(torch.float8_e4m3fn),
            "complex": torch.ones(2, dtype=torch.complex64),
            "flag": torch.tensor([True]),
        }.items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    )


def convolution() -> nn.Module:
    layers = nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 8, 1), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 3)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


class Warm(schedulers.LRScheduler):
    """One that keeps its whole past."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.past: list[float] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        self.past = [*self.past, 1.0]
        return [0.01 * len(self.past) for _ in self.optimizer.param_groups]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def pipeline(
    make: Callable[[], nn.Module], cuts: list[str], scheduler: Any = None, optimizer: Any = sgd
) -> Pipeline:
    torch.manual_seed(0)
    model, x = make(), (batches()[0][0][:4],)
    plan = penstock.partition(penstock.measure(penstock.trace(model, x), x), cuts=cuts, micro_batches=2)
    return Pipeline(model, plan, loss=F.mse_loss, optimizer=optimizer, scheduler=scheduler)


@pytest.mark.parametrize(
    ("make", "cuts", "others", "scheduler"),
    [
        (Mean, ["first"], ["relu"], None),
        (Odd, ["first"], ["relu"], None),
        (convolution, ["2"], ["1"], None),
        (chain, ["1"], ["0", "3"], lambda o: schedulers.ChainedScheduler([schedulers.StepLR(o, 2)])),
        (chain, ["3"], ["1"], Warm),
        (chain, ["3"], ["1"], lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=2)),
    ],
    ids=["a buffer outside", "odd buffers", "channels last", "a chain", "a past", "a cycle"],
)
def test_it_goes_on_with_the_same_bits(make, cuts, others, scheduler, tmp_path):
    whole, first, second = (pipeline(make, c, scheduler) for c in (cuts, cuts, others))
    losses = [whole.step(*batch).loss for batch in batches()]
    for batch in batches()[:SAVED]:
        first.step(*batch)
    penstock.save(first, tmp_path)
    penstock.load(second, tmp_path)
    assert [second.step(*batch).loss for batch in batches()[SAVED:]] == losses[SAVED:]
    expected, found = whole.state_dict(), second.state_dict()
    assert list(expected["model"]) == list(found["model"])
    assert expected["scheduler"] == found["scheduler"]
    for key, tensor in expected["model"].items():
        assert_same(found["model"][key], tensor)
    for name, kept in expected["optimizer"].items():
        assert kept["group"] == found["optimizer"][name]["group"]
        for what, tensor in kept["state"].items():
            assert_same(found["optimizer"][name]["state"][what], tensor)


def test_a_scheduler_whose_past_is_in_tensors_is_refused_before_it_is_lost(tmp_path):
    def scheduler(optimizer: torch.optim.Optimizer) -> schedulers.LRScheduler:
        parts = [schedulers.ConstantLR(optimizer, 0.5, 2), schedulers.ExponentialLR(optimizer, 0.9)]
        return schedulers.SequentialLR(optimizer, parts, [2])

    pipe = pipeline(chain, ["1"], scheduler, lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)))
    with pytest.raises(PlanError, match="SequentialLR keeps _schedulers as list with something else in it"):
        penstock.save(pipe, tmp_path)
