"""Code of a person beside the layers: it finds what the plain loop shows it, or the first step is refused."""

import collections
import contextlib
import copy
import functools
import random
import types
from typing import Any

import numpy
import pytest
import torch
from reference import plain_loop, same_bits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

import penstock


class First(torch.autograd.Function):
    """Calls ``inside`` in its backward."""

    inside: Any = staticmethod(lambda: None)

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        First.inside()
        return gradient


class Net(nn.Module):
    """A cut between ``b`` and ``c`` has linear layers and a buffer that forwards write to on both sides."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 64), nn.Linear(64, 64)
        self.c, self.d = nn.Linear(64, 64), nn.Linear(64, 5)
        self.early, self.late, self.constant = (nn.Buffer(torch.ones(())) for _ in range(3))

    def forward(self, x):
        x = First.apply(torch.relu(self.b(self.a(x))))
        if self.training:
            self.early.mul_(0.9).add_(x.detach().mean())
        x = torch.relu(self.c(x * self.constant))
        if self.training:
            self.late.mul_(0.9).add_(x.detach().mean())
        return self.d(x)


def parts(
    model,
    *,
    loss=lambda model, value: value,
    backward: Any = None,
    hook: Any = None,
    update: Any = None,
    factor: Any = None,
) -> dict[str, Any]:
    """The arguments of a Pipeline of ``model`` with code at one of its doors."""
    First.inside = functools.partial(backward, model) if backward else lambda: None
    for parameter in model.parameters() if hook else ():
        hook(model, parameter)

    def optimizer(named):
        made = torch.optim.SGD(named, lr=0.1, momentum=0.9)
        if update:
            made.register_step_post_hook(lambda *_: update(model, made))
        return made

    given = {"loss": lambda x, y: loss(model, cross_entropy(x, y)), "optimizer": optimizer}
    return given | ({"scheduler": lambda made: LambdaLR(made, lambda _: factor(model))} if factor else {})


def pipeline(model, code, *, world=None, **how):
    x = torch.randn(4, 8)
    profile = penstock.measure(penstock.trace(model, (x,)), (x,), repeats=1)
    plan = penstock.partition(profile, micro_batches=3, **{"cuts": ["mul_1"], **how})
    memory = penstock.MemoryOptions(prefetch_layers=1, writeout_layers=1)
    return penstock.Pipeline(model, plan, world=world, memory=memory, **parts(model, **code))


def batches(number=3):
    draw = torch.Generator().manual_seed(0)
    labels = torch.arange(12) % 5
    return [(torch.randn(12, 8, generator=draw), labels) for _ in range(number)]


def write(tensor):
    with torch.no_grad():
        tensor.mul_(1.5)


def on_gradient(look):
    return lambda model, parameter: parameter.register_hook(lambda gradient: look(model, parameter, gradient))


def when_added(look):
    def hook(model, parameter):
        look(model, parameter)  # torch allows no result

    return lambda model, p: p.register_post_accumulate_grad_hook(functools.partial(hook, model))


class Counts:
    """Counts its calls; what it returns moves with them."""

    def __init__(self):
        self.calls = 0

    def __call__(self, value):
        self.calls += 1
        return value * (1 + self.calls / 100)


COUNTS: dict[nn.Module, Counts] = collections.defaultdict(Counts)


def count_together(model, parameter):
    parameter.register_hook(COUNTS[model])


AWAY = {"parameters_tier": "host"}
REFUSED = {
    "loss, buffer": ({"loss": lambda m, v: v * m.early}, {}, "loss reads early"),
    "loss, data of a buffer": ({"loss": lambda m, v: v * m.early.data}, {}, "loss reads early"),
    "loss, offloaded": ({"loss": lambda m, v: v * m.b.weight.detach().norm()}, AWAY, "loss reads b.weight"),
    "loss, offloaded data": ({"loss": lambda m, v: v + m.b.weight.data.sum()}, AWAY, "loss reads b.weight"),
    "loss writes": ({"loss": lambda m, v: (write(m.d.bias), v)[1]}, {}, "loss writes to d.bias"),
    "backward, buffer": ({"backward": lambda m: m.early + 1}, {}, "backward reads early"),
    "backward, another stage": ({"backward": lambda m: m.d.weight.sum()}, {}, "backward reads d.weight"),
    "backward writes": ({"backward": lambda m: write(m.constant)}, {}, "backward writes to constant"),
    "backward draws": ({"backward": lambda m: torch.rand(1)}, {}, "backward draws"),
    "backward draws in Python": ({"backward": lambda m: random.random()}, {}, "backward draws"),
    "backward draws in NumPy": ({"backward": lambda m: numpy.random.rand()}, {}, "backward draws"),
    "hook, another stage": ({"hook": on_gradient(lambda m, p, g: g * m.d.bias.norm())}, {}, "reads d.bias"),
    "hook, offloaded": ({"hook": on_gradient(lambda m, p, g: g + m.a.weight.mean())}, AWAY, "reads a.weight"),
    "hook draws": ({"hook": on_gradient(lambda m, p, g: g + torch.randn_like(g))}, {}, "backward draws"),
    "hooks count": ({"hook": count_together}, {}, r"counts in hooks.*calls \(\d, then \d"),
    "hook updates": ({"hook": when_added(lambda m, p: p.data.sub_(p.grad))}, {}, "backward writes to"),
    "update, another stage": ({"update": lambda m, o: [p + 1 for p in m.parameters()]}, {}, "update reads"),
    "scheduler": ({"factor": lambda m: float(m.d.bias.detach().norm())}, {}, "update reads d.bias"),
}  # fmt: skip
"""Code, how the pipeline is planned, and what its refusal names."""


@pytest.mark.parametrize(("code", "how", "named"), REFUSED.values(), ids=[*REFUSED])
def test_what_the_schedule_would_show_otherwise_is_refused_by_name(code, how, named):
    torch.manual_seed(0)
    pipe = pipeline(Net(), code, **how)
    with pytest.raises(penstock.PenstockError, match=named):
        pipe.step(*batches(1)[0])


ALLOWED = {
    "loss, own buffer": {"loss": lambda m, v: v * m.late.detach().clone()},
    "loss, constant": {"loss": lambda m, v: v * m.constant},
    "loss, parameter": {"loss": lambda m, v: v * m.a.weight.detach().norm()},
    "loss draws": {"loss": lambda m, v: v * (1 + torch.rand(()))},
    "backward, own parameter": {"backward": lambda m: m.a.weight.sum()},
    "loss counts": {"loss": lambda m, v: COUNTS[m](v)},
    "hooks count": {"hook": lambda m, p: p.register_hook(Counts())},
    "hook scales": {"hook": on_gradient(lambda m, p, g: g * p.detach().norm())},
    "hook clamps": {"hook": when_added(lambda m, p: p.grad.clamp_(-0.01, 0.01))},
    "update clamps": {"update": lambda m, o: [p.data.clamp_(-0.2, 0.2) for p in o.param_groups[0]["params"]]},
    "scheduler": {"factor": lambda m: 0.5},
    "scheduler counts": {"factor": lambda m: COUNTS[m](0.5)},
}  # fmt: skip


HALVES = ("hooks count", "hook scales", "hook clamps")  # what a backward in halves runs otherwise
WAYS = [pytest.param(code, "1f1b", id=name) for name, code in ALLOWED.items()]
WAYS += [
    pytest.param(code, "zb_h1", id=f"{name}, halves", marks=() if name in HALVES else pytest.mark.slow)
    for name, code in ALLOWED.items()
]


@pytest.mark.parametrize(("code", "schedule"), WAYS)
def test_what_is_the_same_at_any_moment_trains_to_the_bits_of_the_plain_loop(code, schedule):
    torch.manual_seed(0)
    model, given = Net(), batches()
    plain = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = [each["loss"] for each in plain_loop(plain, given, micro_batches=3, **parts(plain, **code))]
    pipe = pipeline(model, code, schedule=schedule)
    torch.manual_seed(1)
    assert [pipe.step(*batch).loss for batch in given] == expected
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def step_in_threads(model, code, **how):
    """A step of two ranks, each with a copy of the model."""

    def train(world):
        with contextlib.closing(pipeline(copy.deepcopy(model), code, world=world, **how)) as pipe:
            pipe.step(*batches(1)[0])

    penstock.in_threads(train, ranks=2)


def test_a_parameter_of_another_rank_is_refused_by_name():
    with pytest.raises(penstock.PenstockError, match=r"loss reads a\.weight .* which another rank trains"):
        step_in_threads(Net(), ALLOWED["loss, parameter"])


@pytest.mark.parametrize("code", ["loss counts", "hooks count"])
def test_numbers_that_replicas_count_apart_are_refused_by_name(code):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5))
    with pytest.raises(penstock.PenstockError, match=r"calls \(\d, then \d\), and replicas do so apart"):
        step_in_threads(model, ALLOWED[code], cuts=None, stages=1, replicas=2, exact=True)


def test_a_step_is_watched_for_a_new_shape_of_a_micro_batch_and_not_for_known_ones_put_together_anew():
    reads = False
    torch.manual_seed(0)
    pipe = pipeline(Net(), {"loss": lambda m, v: v * m.early.clone() if reads else v})
    x, y = batches(1)[0]
    for samples in (12, 10):  # micro-batches of 4, and of 4, 3 and 3
        pipe.step(x[:samples], y[:samples])
    reads = True
    pipe.step(x[:9], y[:9])
    with pytest.raises(penstock.PenstockError, match="loss reads early"):
        pipe.step(x[:6], y[:6])


def test_the_first_step_of_a_replica_without_a_share_is_watched():
    guards, run = pipeline(Net(), {}).guards, {}
    step: Any = types.SimpleNamespace(micro_batches={}, number=1)
    assert guards.watched(step, run) is not run
    guards.ran()
    assert guards.watched(step, run) is run


@pytest.mark.parametrize("again", ["a load", "the hundredth step"])
def test_steps_are_watched_again_after(again):
    reads = False
    torch.manual_seed(0)
    pipe = pipeline(Net(), {"loss": lambda m, v: v * m.early.clone() if reads else v})
    x, y = batches(1)[0]
    pipe.step(x, y)
    reads = True
    pipe.step(x, y)  # nobody looks
    if again == "a load":
        pipe.load_state_dict(pipe.state_dict())
    else:
        pipe.num_steps = 100
    with pytest.raises(penstock.PenstockError, match="loss reads early"):
        pipe.step(x, y)
