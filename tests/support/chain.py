"""A chain of plain modules driven by hand: asynchronous streams without engine, frames or plan.

The order is the contract's, in half ticks: F of m on stage s of S at 2m + s, B at 2m + 2S - 1 - s."""

import torch
from torch import nn

from penstock.stages.weight_versions.policies import policy_named
from penstock.stages.weight_versions.versions import versions_of

NUM_STAGES, MICRO_BATCHES, BATCHES = 4, 4, 4
ASYNCHRONOUS = [  # policy and prediction
    (policy, False) for policy in ("latest", "stashed", "vertical_sync", "double_buffered")
]
ASYNCHRONOUS += [("latest", True), ("stashed", True)]


class Scaled(nn.Module):
    """A parameter that autograd saves itself, not a view of it."""

    def __init__(self, *, frozen=False):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 64), requires_grad=not frozen)

    def forward(self, x):
        return torch.relu(x * self.scale)


def model_of():
    """Four stages: a convolution in channels_last with BatchNorm, linear layers, a frozen parameter."""
    first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    middle = [nn.Sequential(nn.Linear(64, 64), Scaled(frozen=frozen)) for frozen in (False, True)]
    first = first.to(memory_format=torch.channels_last)
    return nn.Sequential(first, *middle, nn.Sequential(nn.Linear(64, 10)))


def batches_of(count=BATCHES, samples=5 * MICRO_BATCHES - 1):
    """Batches whose last micro-batch is smaller."""
    generator = torch.Generator().manual_seed(11)
    return [
        (torch.randn(samples, 3, 4, 4, generator=generator), torch.arange(samples) % 10) for _ in range(count)
    ]


class Chain:
    """The stages with their weights and optimizers, and how many versions there were.

    Args:    wrap: from the weights of a stage to those that are driven, for bugs."""

    def __init__(self, policy, *, prediction=False, tier="device", wrap=lambda weights, stage: weights):
        self.model, self.whole = model_of(), policy == "double_buffered"
        schedule = "1f1b" if self.whole else "async_1f1b"
        named = policy_named(policy, schedule=schedule, prediction=prediction, tier=tier)
        self.weights = [
            wrap(versions_of(named, stage.parameters(), stage=s, num_stages=NUM_STAGES), s)
            for s, stage in enumerate(self.model)
        ]
        self.optimizers = [torch.optim.SGD(stage.parameters(), 0.05, 0.9) for stage in self.model]
        for weights, made in zip(self.weights, self.optimizers, strict=True):
            weights.bind(made)
        self.live = {}  # by stage and update since the drain: (num_live, num_bytes) behind it

    def run(self, batches):
        """Feed ``batches``, and drain behind them."""
        self.parts = [
            (x.clone(), y.clone(), len(y) / len(inputs) if self.whole else 1.0)
            for inputs, targets in batches
            for x, y in zip(
                inputs.tensor_split(MICRO_BATCHES), targets.tensor_split(MICRO_BATCHES), strict=True
            )
        ]
        self.between = {}
        for op, s, number in order(len(self.parts), whole=self.whole):
            getattr(self, op)(s, number)
        for weights in self.weights:
            weights.drained()

    def forward(self, s, m):
        x = self.parts[m][0] if s == 0 else self.between.pop((s, m)).detach().clone().requires_grad_()
        with self.weights[s].forward(m, m // MICRO_BATCHES):
            y = self.model[s](x)
        if s == NUM_STAGES - 1:
            y = nn.functional.cross_entropy(y, self.parts[m][1]) * self.parts[m][2]
        else:
            self.between[s + 1, m] = y
        self.between["run", s, m] = x, y

    def backward(self, s, m):
        x, y = self.between.pop(("run", s, m))
        self.weights[s].fetch(m)
        with self.weights[s].backward(m):
            y.backward(self.between.pop(("gradient", s, m), None))
        if s:
            self.between["gradient", s - 1, m] = x.grad
        self.weights[s].done(m)
        if not self.whole:
            self.update(s, m)

    def update(self, s, number):
        self.weights[s].due()
        with self.weights[s].update():
            self.optimizers[s].step()
        self.live[s, number] = self.weights[s].num_live, self.weights[s].num_bytes


def order(num, *, whole):
    """(what, stage, micro-batch or batch) of a stream of ``num`` micro-batches and its drain."""
    last = NUM_STAGES - 1
    found = [(2 * m + s, 2, "forward", s, m) for m in range(num) for s in range(NUM_STAGES)]
    found += [(2 * m + 2 * last + 1 - s, 1, "backward", s, m) for m in range(num) for s in range(NUM_STAGES)]
    if whole:  # before what happens at 2N + 2S - 2, N the micro-batches of the batches up to this one
        ends = [(t, 2 * (t + 1) * MICRO_BATCHES + 2 * last) for t in range(num // MICRO_BATCHES)]
        found += [(tick, 0, "update", s, t) for t, tick in ends for s in range(NUM_STAGES)]
    return [(op, s, number) for _, _, op, s, number in sorted(found)]
