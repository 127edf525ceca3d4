"""Ranks that are threads of one process: none is left, and each draws as one would alone."""

import copy
import threading

import pytest
import torch
from cases import Case
from law import differences
from reference import plain_loop, same_bits
from small_pipelines import profile_of
from torch import nn

import penstock


def test_no_thread_is_left():
    threads = names()
    assert differences(Case(model="mlp", cuts=2, world="threads")) == []
    assert names() == threads


def names():
    """The threads of this process; that of a progress bar comes when a first model is drawn."""
    return sorted(thread.name for thread in threading.enumerate() if thread.name != "tqdm_monitor")


def mean_of_squares(outputs, targets):
    return (outputs - targets).square().mean()


def sgd(named):
    return torch.optim.SGD(named, lr=0.1)


def plan_of(model, x, micro_batches, **options):
    profile = profile_of(model, (x[: len(x) // micro_batches],))
    return penstock.partition(profile, micro_batches=micro_batches, codec="raw", **options)


def trained(plan, model, batches):
    """Gradients of the last step and the losses of all, by rank."""
    models = [copy.deepcopy(model) for _ in range(plan.num_ranks)]

    def train(world):
        pipe = penstock.Pipeline(models[world.rank], plan, loss=mean_of_squares, optimizer=sgd, world=world)
        losses = [pipe.step(x, y).loss for x, y in batches]
        pipe.close()
        return losses, {name: p.grad for name, p in pipe.update.named.items()}

    return penstock.in_threads(train, ranks=plan.num_ranks)


@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.slow), True])
def test_threads_that_draw_at_once_draw_what_one_would(recompute):
    """Layers that draw long are most of the model, so without a turn for each the draws would mix."""
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(12) for part in (nn.Linear(64, 64), nn.Dropout(0.3))))
    batches = [(torch.randn(4096, 64), torch.randn(4096, 64)) for _ in range(2)]
    plan = plan_of(model, batches[0][0], 4, stages=1, replicas=4, exact=True, recompute=recompute)
    plain, before = copy.deepcopy(model), torch.get_rng_state()
    found = trained(plan, model, batches)
    assert same_bits(torch.get_rng_state(), before)
    random = {str(2 * i + 1) for i in range(12)} | {f"_{2 * i + 1}" for i in range(12)}
    expected = list(
        plain_loop(plain, batches, loss=mean_of_squares, optimizer=sgd, micro_batches=4, random=random)
    )
    for losses, gradients in found:
        assert losses == [step["loss"] for step in expected]
        assert [n for n, g in expected[-1]["gradients"].items() if not same_bits(g, gradients[n])] == []
