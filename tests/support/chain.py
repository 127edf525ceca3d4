"""A chain of plain modules driven by hand: asynchronous streams without engine, frames or plan.

The order is the contract's, in half ticks: F of m on stage s of S at 2m + s, B at 2m + 2S - 1 - s."""

import functools

import torch
from reference import same_bits
from replay import replay
from torch import nn

from penstock.stages.memory.saved import NoOffload, SavedActivations
from penstock.stages.memory.store import Store
from penstock.stages.weights.policies import policy_named
from penstock.stages.weights.stashing import versions_of

NUM_STAGES, MICRO_BATCHES, BATCHES = 4, 4, 4
ASYNCHRONOUS = [  # policy and prediction
    (policy, False) for policy in ("latest", "stashed", "vertical_sync", "double_buffered")
]
ASYNCHRONOUS += [("latest", True), ("stashed", True)]
OPTIMIZERS = {
    "sgd": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "nesterov": lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda named: torch.optim.AdamW(named, lr=3e-3),
}


def falling(optimizer):
    """A rate that falls with every update."""
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)


class Scaled(nn.Module):
    """A parameter that autograd saves itself, not a view of it."""

    def __init__(self, *, frozen=False):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 64), requires_grad=not frozen)

    def forward(self, x):
        return torch.relu(x * self.scale)


def model_of(seed=3):
    """Four stages: a convolution in channels_last with BatchNorm, linear layers, a frozen parameter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        first = first.to(memory_format=torch.channels_last)
        return nn.Sequential(
            first,
            nn.Sequential(nn.Linear(64, 64), Scaled()),
            nn.Sequential(nn.Linear(64, 64), Scaled(frozen=True)),
            nn.Sequential(nn.Linear(64, 10)),
        )


def batches_of(count=BATCHES, samples=5 * MICRO_BATCHES - 1):
    """Batches whose last micro-batch is smaller."""
    generator = torch.Generator().manual_seed(11)
    return [
        (torch.randn(samples, 3, 4, 4, generator=generator), torch.arange(samples) % 10) for _ in range(count)
    ]


def stages_of(model):
    """The names of each stage's parameters."""
    return [[f"{s}.{name}" for name, _ in stage.named_parameters()] for s, stage in enumerate(model)]


@functools.lru_cache
def replayed(policy, *, optimizer="sgd", drains=(), prediction=False, scheduler=None):
    """The replay of the same training: its model and what happened between the drains."""
    model = model_of()
    happened = replay(
        model,
        batches_of(),
        stages=stages_of(model),
        policy=policy,
        loss=nn.functional.cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
        micro_batches=MICRO_BATCHES,
        prediction=prediction,
        scheduler=scheduler,
        drains=drains,
    )
    return model, list(happened)


class Chain:
    """The stages with their weights and optimizers, and what was seen: losses, gradients, versions.

    Args:    packed: whether what autograd saves is packed too, as in the tier of saved tensors.
             wrap: from the weights of a stage to those that are driven, for bugs."""

    def __init__(
        self, policy, *, optimizer="sgd", prediction=False, tier="device", packed=False,
        scheduler=None, wrap=lambda weights, stage: weights,
    ):  # fmt: skip
        self.model, self.whole = model_of(), policy == "double_buffered"
        self.weights = [
            wrap(
                versions_of(
                    policy_named(
                        policy,
                        schedule="1f1b" if self.whole else "async_1f1b",
                        prediction=prediction,
                        tier=tier,
                    ),
                    stage.parameters(),
                    stage=s,
                    num_stages=NUM_STAGES,
                ),
                s,
            )
            for s, stage in enumerate(self.model)
        ]
        self.optimizers = [OPTIMIZERS[optimizer](list(stage.named_parameters())) for stage in self.model]
        self.schedulers = [scheduler(made) for made in self.optimizers] if scheduler else []
        for weights, made in zip(self.weights, self.optimizers, strict=True):
            weights.bind(made)
        self.saved = [_saved(stage) if packed else NoOffload() for stage in self.model]
        self.live = {}  # by stage and update since the drain: (num_live, num_bytes) behind it

    def run(self, batches, drains=()):
        """Feed ``batches``; what happened up to each drain, as the replay tells it."""
        pieces, start = [], 0
        for end in [*drains, len(batches)]:
            pieces.append(self.stream(batches[start:end]))
            start = end
        return pieces

    def stream(self, batches):
        """Everything between two drains."""
        self.parts = [
            (x.clone(), y.clone(), len(y) / len(inputs) if self.whole else 1.0)
            for inputs, targets in batches
            for x, y in zip(
                inputs.tensor_split(MICRO_BATCHES), targets.tensor_split(MICRO_BATCHES), strict=True
            )
        ]
        self.between, self.gradients = {}, {}
        self.losses = [torch.empty(0)] * len(self.parts)
        for op, s, number in order(len(self.parts), whole=self.whole):
            getattr(self, op)(s, number)
        for weights in self.weights:
            weights.drained()
        names = [name for name, _ in self.model.named_parameters()]
        updates = [self.gradients[u] for u in sorted(self.gradients)]
        return {"losses": self.losses, "gradients": [{n: u[n] for n in names} for u in updates]}

    def forward(self, s, m):
        x = self.parts[m][0] if s == 0 else self.between.pop((s, m)).detach().clone().requires_grad_()
        with self.weights[s].forward(m, m // MICRO_BATCHES), self.saved[s].forward(m, {0: x}):
            y = self.model[s](x)
        if s == NUM_STAGES - 1:
            loss = nn.functional.cross_entropy(y, self.parts[m][1])
            self.losses[m], y = loss.detach(), loss * self.parts[m][2]
        else:
            self.between[s + 1, m] = y
        self.between["run", s, m] = x, y
        self.saved[s].offload(m, {}, {})
        self.saved[s].wait()

    def backward(self, s, m):
        x, y = self.between.pop(("run", s, m))
        self.saved[s].ready(m)
        self.weights[s].fetch(m)
        with self.weights[s].backward(m):
            y.backward(self.between.pop(("gradient", s, m), None))
        self.saved[s].drop(m)
        if s:
            self.between["gradient", s - 1, m] = x.grad
        self.weights[s].done(m)
        if not self.whole:
            self.update(s, m)

    def update(self, s, number):
        self.weights[s].due()
        named = {f"{s}.{name}": p for name, p in self.model[s].named_parameters()}
        self.gradients.setdefault(number, {}).update({name: p.grad for name, p in named.items()})
        with self.weights[s].update():
            self.optimizers[s].step()
        for scheduler in self.schedulers[s : s + 1]:
            scheduler.step()
        self.live[s, number] = self.weights[s].num_live, self.weights[s].num_bytes

    def close(self):
        for saved in self.saved:
            saved.close()

    def state(self):
        """name -> the optimizer's state of that parameter."""
        return {
            f"{s}.{name}": dict(self.optimizers[s].state.get(p, {}))
            for s, stage in enumerate(self.model)
            for name, p in stage.named_parameters()
        }


def differences(chain, policy, *, optimizer="sgd", prediction=False, drains=(), scheduler=None):
    """Train the chain and the replay: names of everything that differs in a bit."""
    plain, expected = replayed(
        policy, optimizer=optimizer, prediction=prediction, drains=drains, scheduler=scheduler
    )
    pieces = chain.run(batches_of(), drains)
    chain.close()
    found = []
    for piece, (ours, theirs) in enumerate(zip(pieces, expected, strict=True)):
        pairs = enumerate(zip(ours["losses"], theirs["losses"], strict=True))
        found += [f"piece {piece} loss {m}" for m, (a, b) in pairs if not same_bits(a, b)]
        found += [
            f"piece {piece} gradient {update} of {name}"
            for update, (a, b) in enumerate(zip(ours["gradients"], theirs["gradients"], strict=True))
            for name in b
            if not same_bits(a[name], b[name])
            or (b[name] is not None and a[name].stride() != b[name].stride())
        ]
    state = chain.model.state_dict()
    found += [name for name, tensor in plain.state_dict().items() if not same_bits(tensor, state[name])]
    ours, theirs = chain.state(), expected[-1]["state"]
    found += [f"keys of {name}" for name in theirs if set(ours[name]) != set(theirs[name])]
    found += [
        f"{what} of {name}"
        for name, kept in theirs.items()
        for what in kept
        if not same_bits(kept[what], ours[name].get(what))
    ]
    return found


def order(num, *, whole):
    """(what, stage, micro-batch or batch) of a stream of ``num`` micro-batches and its drain."""
    last = NUM_STAGES - 1
    found = [(2 * m + s, 2, "forward", s, m) for m in range(num) for s in range(NUM_STAGES)]
    found += [(2 * m + 2 * last + 1 - s, 1, "backward", s, m) for m in range(num) for s in range(NUM_STAGES)]
    if whole:  # before what happens at 2N + 2S - 2, N the micro-batches of the batches up to this one
        ends = [(t, 2 * (t + 1) * MICRO_BATCHES + 2 * last) for t in range(num // MICRO_BATCHES)]
        found += [(tick, 0, "update", s, t) for t, tick in ends for s in range(NUM_STAGES)]
    return [(op, s, number) for _, _, op, s, number in sorted(found)]


def _saved(stage):
    keep = [*stage.parameters(), *stage.buffers()]
    return SavedActivations(Store(), keep=keep, codec="zero_value", min_bytes=1, modules={})
