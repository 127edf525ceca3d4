"""An optimizer that looks at all parameters together is refused, whoever wrote it; others are left alone."""

import random
import re
import warnings
from typing import Any

import numpy
import pytest
import torch
from cases import Case, plan_of
from torch import nn
from zoo import build, cross_entropy

import penstock
from penstock.pipeline.weights.apart import check_apart
from penstock.pipeline.weights.optimizers import make_optimizer


class Rule(torch.optim.Optimizer):
    """p -= lr * direction(p), where a subclass says what else happens."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def direction(self, p, group, every) -> torch.Tensor:
        raise NotImplementedError

    def step(self, closure: Any = None) -> Any:
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(self.direction(p, group, every), alpha=group["lr"])


class Alone(Rule):
    def direction(self, p, group, every):
        return p.grad / (1 + p.grad.norm())


class ByTheNorm(Rule):
    """As Lamb does: gradients are scaled by the norm over all where it is large."""

    def direction(self, p, group, every):
        total = torch.stack([q.grad.norm() for q in every]).norm()
        return p.grad / total.clamp(min=1)


class OneEstimate(Rule):
    """As Prodigy does: the group keeps a number that all its gradients make."""

    def direction(self, p, group, every):
        group["d"] = group.get("d", 1e-6) + float(p.grad.abs().max()) * 1e-6
        return p.grad * group["d"]


class Noise(Rule):
    """As SGLD does: a draw for every parameter, in their order."""

    def direction(self, p, group, every):
        return p.grad + torch.randn_like(p)


class PythonNoise(Rule):
    def direction(self, p, group, every):
        return p.grad * random.random()


class Careful(Rule):
    """An overflow anywhere skips the update everywhere."""

    def direction(self, p, group, every):
        return p.grad if all(q.grad.isfinite().all() for q in every) else torch.zeros_like(p)


class ByTheCount(Rule):
    def direction(self, p, group, every):
        return p.grad / len(every)


class NeedsClosure(Rule):
    def step(self, closure):  # type: ignore[override]
        return closure()


def by_name(named):
    return torch.optim.AdamW(
        [
            {"params": [p for n, p in named if n.endswith("weight")], "lr": 0.01},
            {"params": [p for n, p in named if not n.endswith("weight")], "weight_decay": 0.0},
        ],
        lr=0.1,
    )


def by_place(named):
    return torch.optim.SGD([{"params": [p], "lr": 0.1 * 0.9**i} for i, (_, p) in enumerate(named)])


def refusal(optimizer, cuts=3):
    """What a pipeline says to an optimizer; "" where it takes it."""
    plan, _ = plan_of(Case(model="mlp", cuts=cuts))
    model, _ = build("mlp")
    try:
        penstock.Pipeline(model, plan, loss=cross_entropy, optimizer=optimizer)
    except penstock.PlanError as error:
        return str(error)
    return ""


TOGETHER = [ByTheNorm, OneEstimate, Noise, PythonNoise, Careful, ByTheCount]
MARKED = [TOGETHER[0], *(pytest.param(kind, marks=pytest.mark.slow) for kind in TOGETHER[1:])]


@pytest.mark.parametrize("kind", MARKED)
def test_an_optimizer_that_looks_at_all_parameters_is_refused(kind):
    said = refusal(lambda named: kind(named))
    assert re.fullmatch(
        "an optimizer works on one stage's parameters at a time and "
        rf"{kind.__name__} looks at all together: \S+ is updated otherwise than apart; use SGD or Adam",
        said,
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOGETHER)
def test_one_stage_is_the_plain_loop(kind):
    assert refusal(lambda named: kind(named), cuts=1) == ""


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_refuse_alike(ranks):
    results = ranks.try_run(refusal_of_the_norm, ranks=2)
    texts = [result for _, result in results]
    assert texts[0] == texts[1]
    assert "ByTheNorm looks at all together" in texts[0]


def refusal_of_the_norm():
    return refusal(lambda named: ByTheNorm(named), cuts=2)


KINDS = "SGD Adam AdamW Adamax NAdam RAdam Adagrad Adadelta RMSprop Rprop ASGD Adafactor".split()
ALONE = [getattr(torch.optim, kind) for kind in KINDS]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"foreach": True}], ids=str)
@pytest.mark.parametrize("kind", [*ALONE, Alone], ids=lambda kind: kind.__name__)
def test_an_optimizer_of_single_parameters_is_taken(kind, settings):
    assert refusal(lambda named: kind(named, **({} if kind is Alone else settings))) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        by_name,
        lambda named: torch.optim.SGD([p for _, p in named], lr=torch.tensor(0.1)),
        lambda named: torch.optim.SGD([p for _, p in named if p.dim() == 1], lr=0.1),
        lambda named: torch.optim.Muon([p for _, p in named if p.dim() == 2]),
        lambda named: torch.optim.SGD([p for n, p in named if n.startswith("1.")], lr=0.1),
    ],
)
def test_groups_by_name_and_shape_are_taken(optimizer):
    assert refusal(optimizer) == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "told"),
    [
        (by_place, r"lr of \S+ is 0\.0\S+ with all of the model's and 0\.1 with those of its stage; choose"),
        (lambda named: torch.optim.SGD(named, lr=0.1 / len(named)), "choose it by name"),
        (
            lambda named: torch.optim.SGD([p for _, p in named][:1], lr=0.1),
            r"takes \S+ with those of its stage only; choose by name",
        ),
    ],
)
def test_settings_by_place_are_refused(optimizer, told):
    assert re.search(told, refusal(optimizer))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Alone, ByTheNorm])
def test_a_function_that_looks_up_its_own_parameters_is_tried_by_twins(kind):
    """Small stand-ins are nowhere in its table; the class that it made is tried in its place."""
    plan, _ = plan_of(Case(model="mlp", cuts=3))
    model, _ = build("mlp")
    rates = {id(p): 0.1 for p in model.parameters()}

    def optimizer(named):
        return kind([{"params": [p], "lr": rates[id(p)]} for _, p in named])

    settings = {"loss": cross_entropy, "optimizer": optimizer}
    if kind is Alone:
        penstock.Pipeline(model, plan, **settings)
        return
    with pytest.raises(penstock.PlanError, match="ByTheNorm looks at all together"):
        penstock.Pipeline(model, plan, **settings)


def test_what_cannot_be_tried_is_said():
    with pytest.warns(UserWarning, match=r"could not be tried on small ones \(TypeError: .*closure"):
        assert refusal(lambda named: NeedsClosure(named)) == ""


def test_trying_draws_nothing_and_touches_nothing():
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    named = list(model.named_parameters())
    before = [p.detach().clone() for p in model.parameters()]
    states = (torch.get_rng_state(), random.getstate(), str(numpy.random.get_state()))
    called = []

    def optimizer(pairs):
        called.append([p for _, p in pairs])
        return torch.optim.Adam(pairs)

    made = {0: make_optimizer(optimizer, named[:2])}
    assert made[0] is not None
    check_apart(optimizer, named, {name: int(name[0]) for name, _ in named}, made)  # type: ignore[arg-type]
    assert len(called) == 4  # the real one first, then one of all and one per stage
    assert not {id(p) for some in called[1:] for p in some} & {id(p) for p in model.parameters()}
    assert all(
        torch.equal(p, kept) and p.grad is None for p, kept in zip(model.parameters(), before, strict=True)
    )
    assert torch.equal(states[0], torch.get_rng_state())
    assert (random.getstate(), str(numpy.random.get_state())) == states[1:]


@pytest.mark.slow
def test_every_kind_of_parameter_is_tried():
    """A rule for a few parameters of one kind is found as well; frozen ones are no matter."""

    class SomeTogether(Rule):
        def direction(self, p, group, every):
            same = [q for q in every if q.dim() == 3 and q.is_complex()]
            return p.grad / (1 + sum(q.grad.abs().sum() for q in same))

    def named(dim, dtype, trained: Any = True):
        shapes = [(6, 5), (7,), (0,), (3, 4, 5)[:dim]] * 20
        return [
            (f"{i}.p", nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=trained))
            for i, shape in enumerate(shapes)
        ]

    def check(pairs):
        check_apart(
            lambda n: SomeTogether(n), pairs, {name: i // 40 for i, (name, _) in enumerate(pairs)}, {}
        )

    with pytest.raises(penstock.PlanError, match="SomeTogether looks at all together"):
        check(named(3, torch.complex64))
    for settings in ((2, torch.complex64), (3, torch.bfloat16), (3, torch.complex64, False)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check(named(*settings))
