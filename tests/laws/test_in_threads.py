"""Ranks that are threads of one process: none is left, and each draws as one would alone."""

import copy

import pytest
import torch
from cases import OPTIMIZERS
from reference import plain_loop, same_bits
from small_pipelines import profile_of
from torch import nn

import penstock


@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.slow), True])
def test_threads_that_draw_at_once_draw_what_one_would(recompute):
    """Layers that draw long are most of the model, so without a turn for each the draws would mix."""
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(12) for part in (nn.Linear(64, 64), nn.Dropout(0.3))))
    batches = [(torch.randn(4096, 64), torch.randn(4096, 64)) for _ in range(2)]
    wishes = {"micro_batches": 4, "codec": "raw", "replicas": 4, "exact": True, "recompute": recompute}
    plan = penstock.partition(profile_of(model, (batches[0][0][:1024],)), stages=1, **wishes)
    models, before = [copy.deepcopy(model) for _ in range(4)], torch.get_rng_state()
    settings = {"loss": nn.functional.mse_loss, "optimizer": OPTIMIZERS["plain"]}

    def train(world):
        pipe = penstock.Pipeline(models[world.rank], plan, world=world, **settings)
        losses = [pipe.step(x, y).loss for x, y in batches]
        pipe.close()
        return losses, {name: p.grad for name, p in pipe.update.named.items()}

    found = penstock.in_threads(train, ranks=4)
    assert same_bits(torch.get_rng_state(), before)
    random = {str(2 * i + 1) for i in range(12)} | {f"_{2 * i + 1}" for i in range(12)}
    expected = list(plain_loop(model, batches, micro_batches=4, random=random, **settings))
    for losses, gradients in found:
        assert losses == [step["loss"] for step in expected]
        assert [n for n, g in expected[-1]["gradients"].items() if not same_bits(g, gradients[n])] == []
