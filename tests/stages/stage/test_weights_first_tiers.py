"""Weights first, with a memory tier: the same bits, nothing unpacked twice; and gradients that end."""

import weakref
from typing import Any

import pytest
import torch
from cases import Case
from law import differences
from reference import same_bits
from torch import nn

import penstock
from penstock.stages.stage.backward import run
from penstock.stages.stage.reuse import Reuse
from penstock.stages.stage.weights_first import run_weights_first

CASES = [
    Case(model="mlp", cuts=2, weights_first=True, tier="packed"),
    Case(model="mlp", cuts=1, weights_first=True, tier="packed", codec="raw"),
    Case(model="gated", cuts="every", weights_first=True, tier="packed", schedule="gpipe"),
    Case(model="tied", cuts=3, weights_first=True, tier="host"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_tier_keeps_the_bits(case):
    assert differences(case) == []


class Twice(nn.Module):
    """What a linear layer behind it saves is nobody else's, and half of it is zero behind a ReLU."""

    def forward(self, x):
        return x * 2


def trained(*, weights_first):
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.ReLU(), Twice())]
    model = nn.Sequential(*layers, nn.Linear(256, 10))
    x, y = torch.randn(256, 256), torch.randint(0, 10, (256,))
    profile = penstock.measure(penstock.trace(model, (x[:128],)), (x[:128],), repeats=1)
    plan = penstock.partition(profile, stages=1, micro_batches=2, weights_first=weights_first, tier="packed")
    made: dict[str, Any] = {
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda named: torch.optim.SGD(named, lr=0.1),
    }
    made["memory"] = penstock.MemoryOptions(prefetch_layers=0)
    pipe = penstock.Pipeline(model, plan, **made)
    saved: Any = pipe.engine.stages[0].saved
    forward = saved.offload
    saved.offload = lambda *given: (forward(*given), saved.wait())  # all that is to leave has left
    pipe.step(x, y)
    pipe.close()
    return saved.num_packs, saved.num_unpacks, [p.grad for p in model.parameters()]


def test_what_is_given_up_is_not_unpacked_again():
    packs, unpacks, expected = trained(weights_first=False)
    assert packs >= unpacks >= 8
    found = trained(weights_first=True)
    assert abs(found[0] - packs) <= 1
    assert found[1] <= unpacks + 1  # what is far away when it is read may be on its way, or not yet
    assert all(same_bits(a, b) for a, b in zip(found[2], expected, strict=True))


@pytest.mark.parametrize("way", [run, run_weights_first], ids=["whole", "first"])
def test_a_gradient_ends_with_the_layer_that_read_it(way):
    anchor = torch.zeros((), requires_grad=True)
    x, gone, most = torch.randn(8, 16) + anchor, [], []
    for _ in range(6):
        product = nn.Linear(16, 16)(x)
        x = torch.tanh(product)

        def arrived(gradients):
            gone.append(weakref.ref(gradients[0]))
            most.append(len({id(found) for reference in gone if (found := reference()) is not None}))

        for made in (x, product):
            made.grad_fn.register_prehook(arrived)  # pyright: ignore[reportOptionalMemberAccess]
    loss = x.sum()
    way([(loss, None)], *([anchor, Reuse()] if way is run_weights_first else []))
    assert len(most) == (12 if way is run else 18)  # a linear layer runs in two halves
    assert max(most) <= 2
