"""Entries of an optimizer's state, as a step of its own shows them."""

import pytest
import torch

from penstock.pipeline.optimizer.optimizers import state_per_byte
from penstock.pipeline.runtime.meter import state_bytes

SGD, Adam = torch.optim.SGD, torch.optim.Adam


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda named: SGD(named, lr=0.1), 0.0),
        (lambda named: SGD(named, lr=0.1, momentum=0.9), 1.0),
        (lambda named: Adam(named), 2.0),
        (lambda named: Adam(named, amsgrad=True), 3.0),
        (lambda named: torch.optim.RMSprop(named), 1.0),
    ],
)
def test_what_is_kept_for_each_byte_is_what_a_run_keeps(make, expected):
    assert state_per_byte(make) == expected
    weight = torch.nn.Parameter(torch.ones(32, 32))
    weight.grad = torch.ones_like(weight)
    made = make([("weight", weight)])
    made.step()
    assert state_bytes([weight], made) - 2 * weight.nbytes == pytest.approx(expected * weight.nbytes, abs=8)


def test_an_optimizer_that_takes_only_its_own_parameters_tells_nothing():
    assert state_per_byte(lambda named: SGD([dict(named)["encoder.bias"]], lr=0.1)) is None
    assert state_per_byte(lambda named: torch.optim.LBFGS([p for _, p in named])) is None


class Noisy(SGD):
    """Draws in every step, and keeps what it has in a dict of its own."""

    def step(self, closure=None):
        torch.rand(3)
        self.__dict__["state"] = {}


def test_a_look_at_an_optimizer_moves_no_random_state():
    before = torch.get_rng_state()
    assert state_per_byte(lambda named: Noisy([p for _, p in named], lr=0.1)) is None
    assert torch.equal(torch.get_rng_state(), before)
