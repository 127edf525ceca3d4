"""Law L8: any split of a batch over replicas gives the gradient of the whole, an empty share included."""

import functools
import threading

import pytest
import torch
from small_pipelines import profile_of
from torch import nn

import penstock

ROWS = 32  # of a micro-batch, of which as many count as its share says
ALONE = threading.Lock()  # all threads draw from one generator
LIMITS = {torch.float64: 1e-13, torch.float32: 1e-5}


def build(dtype):
    with ALONE:
        torch.manual_seed(0)
        layers = nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24)
        return nn.Sequential(*layers, nn.Linear(24, 5)).to(dtype)


def batch_of(shares, dtype):
    generator = torch.Generator().manual_seed(len(shares))
    x = torch.randn(ROWS * len(shares), 12, generator=generator, dtype=torch.float64).to(dtype)
    y = torch.randint(0, 5, (len(x),), generator=generator)
    counts = torch.cat([torch.arange(ROWS) < share for share in shares])
    return x, torch.where(counts, y, -1)


def counted(targets):
    return int((targets >= 0).sum())


def loss(outputs, targets):
    """The mean over the rows that count; 0 where none does."""
    lost = nn.functional.cross_entropy(outputs, targets, ignore_index=-1, reduction="sum")
    return lost / max(1, counted(targets))


def error(found, whole):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, whole, strict=True))


def errors(shares, dtype, plan, world=None):
    """On a rank: the error of the gradients that an update sees."""
    x, y = batch_of(shares, dtype)
    model = build(dtype)
    loss(model(x), y).backward()
    whole = {name: p.grad for name, p in model.named_parameters()}
    pipe = penstock.Pipeline(
        build(dtype), plan, loss=loss, optimizer=functools.partial(torch.optim.SGD, lr=0.0),
        weight=counted, world=world,
    )  # fmt: skip
    pipe.step(x, y)
    mine = pipe.update.named
    return error([p.grad for p in mine.values()], [whole[name] for name in mine])


def error_of_means(shares, dtype):
    """The error of an average of means over as many replicas as micro-batches, as plain DDP has it."""
    (x, y), model, whole = batch_of(shares, dtype), build(dtype), build(dtype)
    loss(whole(x), y).backward()
    for inputs, targets in zip(x.split(ROWS), y.split(ROWS), strict=True):
        (loss(model(inputs), targets) / len(shares)).backward()
    return error(*([p.grad for p in each.parameters()] for each in (model, whole)))


def plan_of(shares, replicas, dtype, weights=()):
    x, _ = batch_of(shares, dtype)
    profile = profile_of(build(dtype), (x[:ROWS],))
    options = {"micro_batches": len(shares), "codec": "raw", "replicas": replicas, "shares": weights}
    return penstock.partition(profile, stages=None if isinstance(replicas, list) else 1, **options)


FIVE = (29, 3, 5, 17, 0)


@pytest.mark.parametrize(
    ("shares", "replicas", "weights"),
    [
        ((29, 3), 2, ()),
        ((32, 0), 2, ()),
        ((1, 1, 30), 3, ()),
        (FIVE, [2, 2], ()),
        ((32, 1, 1, 7, 11, 2), [2, 1], ()),
        (FIVE, [1, 3], ()),
        (FIVE, 2, (3, 1)),
        (FIVE, 2, (1, 0)),
        (FIVE, [2, 2], (2, 1, 1, 3)),
        (FIVE, [1, 3], (1, 5, 0, 1)),
    ],
    ids=str,
)
def test_a_split_batch_has_the_gradient_of_the_whole(shares, replicas, weights):
    """Dealt in turn, or by weight: replicas of which some get no micro-batch, or none that counts."""
    for dtype, limit in LIMITS.items():
        plan = plan_of(shares, replicas, dtype, weights)
        train = functools.partial(errors, shares, dtype, plan)
        ours, means = max(penstock.in_threads(train, ranks=plan.num_ranks)), error_of_means(shares, dtype)
        print(f"shares {shares} on {plan.replicas} in {dtype}: {ours:.1e}, an average of means {means:.1e}")
        assert ours <= limit
        assert means > 0.1 or replicas != len(shares)  # what the law is there for
