"""A clip over all stages has the bits of clip_grad_norm_ over the whole model, whatever the dtypes and where
the gradients lie."""

import copy
import random

import pytest
import torch
from cases import OPTIMIZERS
from reference import plain_loop, same_bits
from torch import nn
from zoo import cross_entropy

import penstock
from penstock.pipeline.distributed.process_group import World
from penstock.pipeline.optimizer.clip import clip_together

FLOATS = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
DTYPES = [*FLOATS, torch.complex64, torch.complex128]


def gradients_of(seed):
    """Parameters with gradients of mixed dtypes: some empty, some of one number, some missing, some not
    finite."""
    source, chosen = torch.Generator().manual_seed(seed), random.Random(seed)
    dtypes = chosen.sample(DTYPES, chosen.randint(1, 4))
    found = {}
    for i in range(chosen.randint(1, 12)):
        shape = chosen.choice([(), (0,), (1,), (7,), (33, 5)])
        parameter = nn.Parameter(torch.zeros(shape, dtype=chosen.choice(dtypes)))
        if chosen.random() < 0.85:
            parameter.grad = torch.randn(shape, generator=source, dtype=torch.float64).to(parameter.dtype)
            parameter.grad *= chosen.choice([1e-3, 1.0, 50.0])
        if parameter.numel() and parameter.grad is not None and seed % 7 == 0 and i == 2:
            parameter.grad.view(-1)[0] = chosen.choice([float("inf"), float("nan"), -float("nan")])
        found[f"p{i}"] = parameter
    return found


def clipped_otherwise(world, seeds, largest):
    """Parameters that are clipped to other bits than torch's, each rank holding its share of them."""
    bad = []
    for seed in seeds:
        ours, theirs = gradients_of(seed), gradients_of(seed)
        owner = {name: random.Random(f"{seed}{name}").randrange(world.size) for name in ours}
        mine = {name: parameter for name, parameter in ours.items() if owner[name] == world.rank}
        clip_together(world, mine, largest, owner=owner)
        torch.nn.utils.clip_grad_norm_(theirs.values(), largest)
        bad += [(seed, name) for name, p in mine.items() if not same_bits(p.grad, theirs[name].grad)]
    return bad


@pytest.mark.parametrize("largest", [0.1, 3, 1e9])
def test_a_clip_has_the_bits_of_clip_grad_norm(largest):
    assert clipped_otherwise(World.alone(), range(100), largest) == []


def test_ranks_clip_together_as_one_process_would():
    assert penstock.in_threads(lambda world: clipped_otherwise(world, range(60), 0.1), ranks=2) == [[], []]


class Mixed(nn.Module):
    """A body of one dtype, norms of another, and a complex layer between them."""

    def __init__(self, body, norms):
        super().__init__()
        self.dtypes = (body, norms)
        self.a, self.n = nn.Linear(24, 16).to(body), nn.LayerNorm(16).to(norms)
        self.w = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))
        self.c = nn.Linear(16, 5).to(body)

    def forward(self, x):
        body, norms = self.dtypes
        h = torch.relu(self.n(self.a(x.to(body)).to(norms)))
        h = (torch.fft.fft(h.to(torch.float32)) @ self.w).abs()
        return self.c(h.to(body)).float()


PAIRS = [((torch.bfloat16, torch.float32), 1), ((torch.bfloat16, torch.float32), 2)]
PAIRS += [((torch.float64, torch.float16), 2)]
OTHERS = zip(FLOATS[:2] + FLOATS[3:], (torch.bfloat16, torch.float64, torch.float32), strict=True)
PAIRS += [pytest.param(pair, 2, marks=pytest.mark.slow) for pair in OTHERS]


def planned(pair, **options):
    """A plan of two stages, three models with the same weights, and three batches to train them with."""
    torch.manual_seed(0)
    model, example = Mixed(*pair), (torch.randn(3, 24),)
    models = [copy.deepcopy(model) for _ in range(3)]
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    batches = [(torch.randn(9, 24), torch.randint(5, (9,))) for _ in range(3)]
    return penstock.partition(profile, cuts=["n"], micro_batches=3, **options), models, batches


@pytest.mark.parametrize(("pair", "ranks"), PAIRS, ids=str)
def test_a_model_of_three_dtypes_trains_like_the_plain_loop(pair, ranks):
    plan, (plain, *models), batches = planned(pair, ranks=ranks)
    settings = {"loss": cross_entropy, "optimizer": OPTIMIZERS["sgd"], "clip": 0.1}

    def train(world):
        pipe = penstock.Pipeline(models[world.rank], plan, deadline=20, world=world, **settings)
        for x, y in batches:
            pipe.step(x, y)
        return pipe.update.named

    trained = penstock.in_threads(train, ranks=ranks)
    *_, _ = plain_loop(plain, batches, micro_batches=3, **settings)
    theirs = dict(plain.named_parameters())
    assert sum(map(len, trained)) == len(theirs)
    assert [n for own in trained for n, p in own.items() if not same_bits(p, theirs[n])] == []
