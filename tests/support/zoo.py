"""Small models that hold every trap of an exact cut: name -> (model, batches)."""

import random
from itertools import cycle, islice

import torch
from torch import nn
from torch.nn import functional as F
from torchvision import models
from torchvision.models.resnet import BasicBlock
from traps import TRAPS

from penstock.pipeline.models import GPT


class Tied(nn.Module):
    """One Linear used in every block, and its weight read raw beside it."""

    def __init__(self, width=24, blocks=2):
        super().__init__()
        self.start, self.tied = nn.Linear(192, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.end = nn.Linear(width, 10)

    def forward(self, x):
        x = self.start(x.flatten(1))
        for block in self.blocks:
            x = x + torch.tanh(self.tied(torch.relu(block(x)))) * self.tied.weight.mean()
        return self.end(x)


class Gated(nn.Module):
    """Halves of a chunk: slices with gaps cross the cuts, and misaligned ones."""

    def __init__(self, width=37, blocks=2):
        super().__init__()
        self.start = nn.Linear(192, width)
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(blocks))
        self.back = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(blocks))
        self.end = nn.Linear(width, 10)

    def forward(self, x):
        x = self.start(x.flatten(1))
        for wide, back in zip(self.wide, self.back, strict=True):
            a, b = wide(x).chunk(2, dim=-1)
            x = x + back(a * F.gelu(b))
        return self.end(x)


class Penalized(nn.Module):
    """A parameter of the last stage goes to the loss as it is."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(192, 17), nn.ReLU(), nn.Linear(17, 17), nn.Linear(17, 10))
        self.scale = nn.Parameter(torch.ones(10))

    def forward(self, x):
        return self.body(x.flatten(1)) * 2, self.scale


class Padded(nn.Module):
    """Attention over tokens, 0 is padding: it is hidden where there is some, and not looked at elsewhere."""

    def __init__(self, width=8, blocks=2):
        super().__init__()
        self.words, self.places = nn.Embedding(23, width), nn.Embedding(12, width)
        self.mixed = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(blocks))
        self.back = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.end = nn.Linear(width, 23)

    def forward(self, tokens):
        hidden = tokens == 0
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for mixed, back in zip(self.mixed, self.back, strict=True):
            q, k, v = mixed(x).chunk(3, -1)
            weights = q @ k.mT
            if hidden.any():
                weights = weights.masked_fill(hidden[:, None], -1e9)
            x = x + back(weights.softmax(-1) @ v)
        return self.end(x)


class Dag(nn.Module):
    """A seeded random graph: early and late users, tied layers, identities, chunks, sizes, in-place."""

    def __init__(self, seed, layers=8, width=20, pool=4):
        super().__init__()
        self.seed, self.layers, self.width = seed, layers, width
        self.start, self.end = nn.Linear(192, width), nn.Linear(width, 10)
        self.pool = nn.ModuleList(nn.Linear(width, width) for _ in range(pool))
        self.identity, self.dropout = nn.Identity(), nn.Dropout(0.1)
        self.scale = nn.Parameter(torch.randn(width))
        self.frozen = nn.Parameter(torch.randn(width), requires_grad=False)
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(layers))
        self.register_buffer("shift", torch.randn(width))

    def forward(self, x):
        choose = random.Random(self.seed)
        values = [self.start(x.flatten(1))]

        def pick():
            near = max(0, len(values) - 1 - choose.randrange(4))
            return values[choose.randrange(len(values))] if choose.random() < 0.5 else values[near]

        for i in range(self.layers):
            values.append(self._one(choose.randrange(15), i, pick(), pick, choose))
        total = values[-1]
        for value in values[-5:-1]:
            total = total + value
        return self.end(torch.tanh(total))

    def _one(self, kind, i, a, pick, choose):
        if kind <= 2:
            return torch.tanh(self.pool[choose.randrange(len(self.pool))](a))
        if kind == 3:
            return (a * pick()).tanh()
        if kind == 4:
            return self.norms[i](a + pick() + pick())
        if kind == 5:
            return self.identity(a)  # the same object under a second name
        if kind == 6:
            return a.contiguous()  # the same object again
        if kind == 7:
            p, q = a.chunk(2, dim=1)
            return torch.cat([q * torch.sigmoid(p), F.silu(p)], 1)
        if kind == 8:  # numbers cross
            return a.view(a.size(0), 2, -1).transpose(1, 2).reshape(a.shape[0], self.width)
        if kind == 9:
            return F.relu(self.norms[i](a), inplace=True) + 0.1 * a
        if kind == 10:
            return self.dropout(a) + self.scale * pick()
        if kind == 11:  # booleans cross
            return torch.where(a > 0, pick(), a * self.frozen)
        if kind == 12:  # integers cross
            return a.gather(1, a.argsort(1)) - pick() * self.shift
        if kind == 13:
            return a - pick().detach()
        return a.unsqueeze(0).expand(2, -1, -1).sum(0) * 0.5


def cross_entropy(outputs, targets):
    """The mean over samples, or over the characters of all samples; plus the squares of a second output."""
    if isinstance(outputs, tuple):
        return cross_entropy(outputs[0], targets) + outputs[1].square().sum()
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def images(size, samples=11, steps=3, channels=3):
    generator, shape = torch.Generator().manual_seed(3), (samples, channels, size, size)
    return [
        (torch.randn(shape, generator=generator), torch.randint(10, (samples,), generator=generator))
        for _ in range(steps)
    ]


def text(length=16, vocabulary=61, samples=11, steps=3):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(vocabulary, (steps, 2, samples, length), generator=generator)
    return [(inputs.clone(), targets.clone()) for inputs, targets in tokens]


def padded(samples=11):
    """Padding in some samples of the longest batch, in most of a shorter one, in none of the third."""
    generator = torch.Generator().manual_seed(3)
    batches = []
    for length, every in ((12, 4), (7, 2), (12, 12)):
        tokens = torch.randint(1, 23, (samples, length), generator=generator)
        tokens[every - 1 :: every, -2:] = 0
        batches.append((tokens, tokens.clone()))
    return batches


def mlp():
    return nn.Sequential(
        nn.Flatten(1), nn.Linear(192, 33), nn.ReLU(), nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 10)
    )


def gpt(**settings):
    return GPT(vocabulary=61, length=16, width=48, heads=4, layers=1, **settings)


def residual():
    """The parts of ResNet-18, at a thousandth of its size: BatchNorm, branches, strides, ReLU in place."""
    narrower = nn.Sequential(nn.Conv2d(8, 16, 1, stride=2, bias=False), nn.BatchNorm2d(16))
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        BasicBlock(8, 8),
        BasicBlock(8, 16, stride=2, downsample=narrower),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(1),
        nn.Linear(16, 10),
    )


def channels_last(pairs):
    return [(x.contiguous(memory_format=torch.channels_last), y) for x, y in pairs]


DAGS = [f"dag{seed}" for seed in range(18)]
ZOO = {
    "mlp": (mlp, lambda: images(8)),
    "penalized": (Penalized, lambda: images(8)),
    "tied": (Tied, lambda: images(8)),
    "gated": (Gated, lambda: images(8)),
    "padded": (Padded, padded),
    "residual": (residual, lambda: images(8)),
    "residual_channels_last": (
        lambda: residual().to(memory_format=torch.channels_last),
        lambda: channels_last(images(8)),
    ),
    "resnet18": (lambda: models.resnet18(num_classes=10), lambda: images(32)),
    "resnet18_channels_last": (
        lambda: models.resnet18(num_classes=10).to(memory_format=torch.channels_last),
        lambda: channels_last(images(32)),
    ),
    "mobilenet": (lambda: models.mobilenet_v3_small(num_classes=10), lambda: images(32)),
    "squeezenet": (lambda: models.squeezenet1_1(num_classes=10), lambda: images(48)),
    "densenet": (lambda: models.densenet121(num_classes=10), lambda: images(32)),
    "gpt_gelu_dropout": (lambda: gpt(activation="gelu", dropout=0.1, tied=False), text),
    "gpt_relu": (lambda: gpt(activation="relu", dropout=0.0, tied=False), text),
    "gpt_tied": (lambda: gpt(activation="gelu", dropout=0.1, tied=True), text),
    **{name: (kind, lambda: images(8)) for name, kind in TRAPS.items()},
    **{name: (lambda seed=seed: Dag(seed), lambda: images(8)) for seed, name in enumerate(DAGS)},
}


def build(name, dtype=None, steps=3):
    """The model called ``name``, freshly initialised from a fixed seed, and its batches."""
    torch.manual_seed(7)
    make, batches = ZOO[name]
    model, pairs = make(), [*islice(cycle(batches()), steps)]
    if dtype is not None:
        model = model.to(dtype)
        pairs = [(x.to(dtype) if x.is_floating_point() else x, y) for x, y in pairs]
    return model, pairs
