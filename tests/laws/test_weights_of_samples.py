"""Law L8: any split of a batch over replicas gives the gradient of the whole, an empty share included."""

import copy
import dataclasses
import functools
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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


def errors(shares, dtype, plan_path, world=None):
    """On a rank: the error of the gradients that an update sees, and of those of DDP over the same shares."""
    plan = penstock.Plan.load(plan_path)
    x, y = batch_of(shares, dtype)
    model = build(dtype)
    whole = dict(model.named_parameters())
    loss(model(x), y).backward()
    whole = {name: p.grad for name, p in whole.items()}
    pipe = penstock.Pipeline(
        build(dtype), plan, loss=loss, optimizer=functools.partial(torch.optim.SGD, lr=0.0),
        weight=counted, world=world,
    )  # fmt: skip
    pipe.step(x, y)
    mine = pipe.update.named
    ours = error([p.grad for p in mine.values()], [whole[name] for name in mine])
    if plan.replicas != (len(shares),):
        return ours, 0.0
    rank = dist.get_rank()
    plain = DistributedDataParallel(copy.deepcopy(build(dtype)))
    part = slice(rank * ROWS, (rank + 1) * ROWS)
    loss(plain(x[part]), y[part]).backward()
    return ours, error([p.grad for p in plain.module.parameters()], list(whole.values()))


def plan_of(shares, replicas, dtype, weights=()):
    x, _ = batch_of(shares, dtype)
    graph = penstock.trace(build(dtype), (x[:ROWS],))
    profile = penstock.measure(graph, (x[:ROWS],), repeats=1)
    options = {"micro_batches": len(shares), "codec": "raw", "replicas": replicas, "shares": weights}
    return penstock.partition(profile, stages=None if isinstance(replicas, list) else 1, **options)


@pytest.mark.parametrize(
    ("shares", "replicas"),
    [
        ((29, 3), 2),
        ((32, 0), 2),
        pytest.param((1, 1, 30), 3, marks=pytest.mark.slow),
        ((29, 3, 5, 17, 0), [2, 2]),
        ((32, 1, 1, 7, 11, 2), [2, 1]),
        pytest.param((29, 3, 5, 17, 0), [1, 3], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_split_batch_has_the_gradient_of_the_whole(shares, replicas, ranks, tmp_path):
    for dtype, limit in LIMITS.items():
        plan = plan_of(shares, replicas, dtype)
        plan.save(tmp_path / "plan.json")
        found = ranks.run(errors, shares, dtype, str(tmp_path / "plan.json"), ranks=plan.num_ranks)
        ours, plain = map(max, zip(*found, strict=True))
        said = f", DDP {plain:.1e}" if plan.num_stages == 1 else ""
        print(f"shares {shares} on {plan.replicas} in {dtype}: {ours:.1e}{said}")
        assert ours <= limit
        if plan.num_stages == 1:
            assert plain > 0.1  # what the law is there for


@pytest.mark.parametrize(
    ("weights", "replicas"),
    [((3, 1), 2), ((1, 0), 2), ((2, 1, 1, 3), [2, 2]), ((1, 5, 0, 1), [1, 3])],
    ids=str,
)
def test_threads_that_are_dealt_micro_batches_by_weight_have_the_gradient_of_the_whole(
    weights, replicas, tmp_path
):
    for dtype, limit in LIMITS.items():
        plan = plan_of((29, 3, 5, 17, 0), replicas, dtype, weights)
        plan.save(tmp_path / "plan.json")
        train = functools.partial(errors, (29, 3, 5, 17, 0), dtype, tmp_path / "plan.json")
        found = penstock.in_threads(train, ranks=plan.num_ranks)
        assert max(ours for ours, _ in found) <= limit


def test_a_batch_smaller_than_the_replicas_leaves_one_with_nothing_to_do(ranks, tmp_path):
    plan = plan_of((29, 3), 2, torch.float64)
    plan.save(tmp_path / "plan.json")
    for exact in (False, True):
        found = ranks.run(of_one_sample, str(tmp_path / "plan.json"), exact, ranks=2)
        assert found == [[0.0] * 8] * 2, exact


def of_one_sample(plan_path, exact):
    """On a rank: how far the gradients of a batch of one sample are from those of the plain model."""
    plan = penstock.Plan.load(plan_path)
    plan = dataclasses.replace(plan, exact=exact)
    x, y = batch_of((1,), torch.float64)
    model = build(torch.float64)
    loss(model(x[:1].clone()), y[:1]).backward()
    pipe = penstock.Pipeline(
        build(torch.float64), plan, loss=loss, optimizer=lambda named: torch.optim.SGD(named, lr=0.1)
    )
    pipe.step(x[:1], y[:1])
    mine = pipe.update.named.values()
    return [error([a.grad], [b.grad]) for a, b in zip(mine, model.parameters(), strict=True)]
