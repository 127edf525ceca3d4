"""What a cut, a trace or a loss would change without a word is refused, or has the same bits."""

import copy
import random

import pytest
import torch
from cases import OPTIMIZERS
from reference import plain_loop, same_bits
from torch import nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary
from zoo import cross_entropy

import penstock


class Base(nn.Module):
    seen: torch.Tensor

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 20), nn.Linear(20, 20), nn.Linear(20, 20)
        self.end, self.norm = nn.Linear(20, 3), nn.BatchNorm1d(20)
        self.register_buffer("seen", torch.zeros(20))
        self.plain = torch.zeros(20)
        self.frozen = nn.Parameter(torch.zeros(20), requires_grad=False)
        self.register_buffer("alias", self.seen[:3])


def of(forward):
    torch.manual_seed(1)
    return type("Net", (Base,), {"forward": forward})()


def batches(samples=11, steps=2):
    return [(torch.randn(samples, 6), torch.randint(3, (samples,))) for _ in range(steps)]


def every(model, micro_batches=3, **settings):
    """A pipeline cut at every layer where a cut is allowed."""
    example = (torch.randn(4, 6),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    cuts = [layer.name for i, layer in enumerate(profile.layers[:-1]) if i not in profile.refused]
    plan = penstock.partition(
        profile, cuts=cuts or None, stages=None if cuts else 1, micro_batches=micro_batches
    )
    settings = {"loss": cross_entropy, "optimizer": OPTIMIZERS["sgd"], **settings}
    return penstock.Pipeline(model, plan, **settings)


def drops_layers(self, x):
    y = self.a(x)
    return self.end(y if self.training and random.random() < 0.1 else self.b(y))


def draws(self, x):
    return self.end(self.b(self.a(x)) * torch.rand(()))


def bakes_a_buffer(self, x):
    y = self.a(x)
    torch.Tensor.copy_(self.seen, self.seen * 0.9 + y.detach().mean(0))
    return self.end(self.b(y))


def scatters(self, x):
    y = self.a(x)
    made = torch.zeros(3, 20).index_add_(0, torch.argmax(y[:, :3], 1), y.detach())
    return self.end(self.b(y) + made.sum(0))


ONCE = [drops_layers, draws, bakes_a_buffer, scatters]


@pytest.mark.parametrize("forward", ONCE)
def test_what_happens_once_while_tracing_is_refused(forward):
    state = random.getstate()
    with pytest.raises(penstock.PlanError, match=r"torch\.fx"):
        penstock.trace(of(forward), (torch.randn(4, 6),))
    random.setstate(state)


def test_a_gradient_that_no_frame_keeps_is_refused():
    def wide(self, x):
        y = torch.relu(self.a(x))
        return self.rest(torch.cat([self.one(y), self.many(y)], 1))

    model = of(wide)
    model.one, model.many, model.rest = nn.Linear(20, 1), nn.Linear(20, 300), nn.Linear(301, 3)
    with pytest.raises(
        penstock.StageError, match=r"the gradient of one has strides \(301, 1\).*cut elsewhere"
    ):
        every(model).step(*batches(200)[0])


def test_a_loss_that_reads_a_parameter_is_refused():
    model = of(lambda self, x: self.end(self.b(self.a(x))))
    pipe = every(model, loss=lambda o, t: F.cross_entropy(o, t) + 0.1 * model.a.weight.square().sum())
    with pytest.raises(penstock.StageError, match="the loss reads a parameter of the model"):
        pipe.step(*batches()[0])


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda o, t: F.cross_entropy(o, t).detach(), "depends on trained parameters"),
        (lambda o, t: F.cross_entropy(o, t, reduction="none"), "the loss is one number"),
        (lambda o, t: 1.0, "the loss is one number"),
    ],
)
def test_a_loss_that_trains_nothing_is_refused(loss, told):
    with pytest.raises(penstock.StageError, match=told):
        every(of(lambda self, x: self.end(self.b(self.a(x)))), loss=loss).step(*batches()[0])


def test_training_without_gradients_is_refused():
    pipe = every(of(lambda self, x: self.end(self.b(self.a(x)))))
    with torch.no_grad(), pytest.raises(penstock.PlanError, match="training needs gradients"):
        pipe.step(*batches()[0])


def test_optimizers_that_are_none_of_the_stage_are_refused():
    model = of(lambda self, x: self.end(self.b(self.a(x))))
    for optimizer, told in [
        (lambda named: torch.optim.SGD(model.parameters(), lr=0.1), "parameters of its own stage"),
        (lambda named: None, "makes a torch optimizer"),
        (torch.optim.SGD(model.parameters(), lr=0.1), "optimizer is a function"),
    ]:
        with pytest.raises(penstock.PlanError, match=told):
            every(model, optimizer=optimizer)


def returns_statistics(self, x):
    return self.end(torch.relu(self.b(self.norm(self.a(x))))), self.norm.running_mean


def returns_view(self, x):
    return self.end(torch.relu(self.b(self.a(x)))), self.b.weight.t()


def reads_alias(self, x):
    y = self.a(x)
    if self.training:
        torch.Tensor.copy_(self.seen, y.detach().mean(0))
    return self.end(torch.relu(self.b(y))) + self.alias


def slices_shape(self, x):
    shape = self.a(x).shape
    return self.end(self.b(self.a(x)).view(shape[:1] + torch.Size([20])))


def other_order(self, x):
    y = self.a(x) * 2
    z = self.b(y)
    if not self.training:
        y.add_(1)
    return self.end(z + y)


def with_plain_tensors(self, x):
    return self.end(self.b(self.a(x)) + torch.arange(20.0) + self.plain)


@pytest.mark.parametrize(
    "forward", [returns_statistics, returns_view, reads_alias, slices_shape, other_order, with_plain_tensors]
)
def test_odd_models_have_the_same_bits(forward):
    def loss(outputs, targets):
        if isinstance(outputs, tuple):
            return F.cross_entropy(outputs[0], targets) + outputs[1].sum()
        return F.cross_entropy(outputs, targets)

    model, pairs = of(forward), batches()
    plain = copy.deepcopy(model)
    pipe = every(model, loss=loss)
    loop = plain_loop(plain, pairs, loss=loss, optimizer=OPTIMIZERS["sgd"], micro_batches=3)
    for (x, y), expected in zip(pairs, loop, strict=True):
        assert pipe.step(x, y).loss == expected["loss"]
        assert all(
            same_bits(a, b)
            for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
        )
        found, wanted = pipe.evaluate(x[:5]), copy.deepcopy(plain).eval()(x[:5])
        for a, b in zip(*((o if isinstance(o, tuple) else (o,)) for o in (found, wanted)), strict=True):
            assert same_bits(a, b)


def test_autocast_is_the_plain_loop_without_its_weight_cache():
    model, pairs = of(lambda self, x: self.end(torch.relu(self.b(self.norm(self.b(self.a(x))))))), batches()
    plain = copy.deepcopy(model)

    def loss(outputs, targets):
        return F.cross_entropy(outputs, targets)

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = plain

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                return self.inner(x)

    def cast_loss(outputs, targets):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return loss(outputs, targets)

    pipe = every(model, autocast=torch.bfloat16)
    loop = plain_loop(Cast(), pairs, loss=cast_loss, optimizer=OPTIMIZERS["sgd"], micro_batches=3)
    for (x, y), expected in zip(pairs, loop, strict=True):
        assert pipe.step(x, y).loss == expected["loss"]
        assert all(same_bits(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize(
    "scheduler", [torch.optim.lr_scheduler.StepLR, torch.optim.lr_scheduler.CosineAnnealingLR]
)
def test_a_state_carries_the_course_of_the_learning_rate(scheduler):
    def build():
        model = of(lambda self, x: self.end(self.b(self.a(x))))
        return every(model, scheduler=lambda optimizer: scheduler(optimizer, 3)), model

    pairs = batches(steps=6)
    (first, expected), (second, found) = build(), build()
    for pair in pairs:
        first.step(*pair)
    third, _ = build()
    for pair in pairs[:4]:
        third.step(*pair)
    second.load_state_dict(third.state_dict())
    for pair in pairs[4:]:
        second.step(*pair)
    assert all(same_bits(a, b) for a, b in zip(found.parameters(), expected.parameters(), strict=True))


def test_evaluating_keeps_only_what_is_still_read():
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(30)))
    example = (torch.randn(4, 256),)
    plan = penstock.partition(penstock.measure(penstock.trace(model, example), example, repeats=1), stages=1)
    pipe = penstock.Pipeline(model, plan, loss=F.mse_loss, optimizer=OPTIMIZERS["sgd"])
    alive, most = [], 0

    def watch(module, args, output):
        nonlocal most
        alive.append(WeakTensorKeyDictionary())
        alive[-1][output] = None
        most = max(most, sum(len(one) for one in alive))

    for module in model:
        module.register_forward_hook(watch)
    pipe.evaluate(torch.randn(64, 256))
    assert most <= 3
