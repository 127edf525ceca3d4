"""An optimizer that looks at all parameters together is refused, whoever wrote it; others are left alone."""

import contextlib
import random
import re
import warnings
from typing import Any

import numpy
import pytest
import torch
from cases import Case, plan_of
from disagreements import by_name
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from zoo import build, cross_entropy

import penstock
from penstock.pipeline.optimizer import separability
from penstock.pipeline.optimizer.optimizers import make_optimizer
from penstock.pipeline.optimizer.separability import SEPARABLE, check_separable


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


def rule(name, direction) -> type[Rule]:
    return type(name, (Rule,), {"direction": lambda self, *given: direction(*given)})


def by_an_estimate(p, group, every):
    group["d"] = group.get("d", 1e-6) + float(p.grad.abs().max()) * 1e-6
    return p.grad * group["d"]


def if_all_are_finite(p, group, every):
    return p.grad if all(q.grad.isfinite().all() for q in every) else torch.zeros_like(p)


def by_the_norm(p, group, every):
    return p.grad / torch.stack([q.grad.norm() for q in every]).norm().clamp(min=1)


Alone = rule("Alone", lambda p, group, every: p.grad / (1 + p.grad.norm()))
ByTheNorm = rule("ByTheNorm", by_the_norm)  # as Lamb does, where the norm over all is large
OneEstimate = rule("OneEstimate", by_an_estimate)  # as Prodigy does: one number that all gradients make
Noise = rule("Noise", lambda p, group, every: p.grad + torch.randn_like(p))  # as SGLD does, in their order
PythonNoise = rule("PythonNoise", lambda p, group, every: p.grad * random.random())
Careful = rule("Careful", if_all_are_finite)  # an overflow anywhere skips the update everywhere
ByTheCount = rule("ByTheCount", lambda p, group, every: p.grad / len(every))


class NeedsClosure(Rule):
    def step(self, closure):  # type: ignore[override]
        return closure()


def by_place(named):
    return torch.optim.SGD([{"params": [p], "lr": 0.1 * 0.9**i} for i, (_, p) in enumerate(named)])


def named_parameters():
    """Of three layers, which are the stages."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    return list(model.named_parameters())


def refusal(optimizer, *, in_turn=False, named=None):
    """Refusal of an optimizer of three stages, or of one that steps in turn; "" for none."""
    named = named or named_parameters()
    part_of = {name: int(name[0]) for name, _ in named}
    if in_turn:
        made = [make_optimizer(optimizer, named)]
    else:
        stages = [[pair for pair in named if part_of[pair[0]] == stage] for stage in range(3)]
        made = [make_optimizer(optimizer, own) for own in stages]
    try:
        check_separable(optimizer, named, part_of, [one for one in made if one], in_turn=in_turn)
    except penstock.PlanError as error:
        return str(error)
    return ""


TOGETHER = [ByTheNorm, OneEstimate, Noise, PythonNoise, Careful, ByTheCount]


@pytest.mark.parametrize("kind", TOGETHER)
def test_an_optimizer_that_looks_at_all_parameters_is_refused(kind):
    looks = rf"{kind.__name__} looks at all together, or draws random numbers: \S+ is updated otherwise than"
    rule = "an optimizer works on one stage's parameters at a time and "
    assert re.fullmatch(f"{rule}{looks} apart; use SGD or Adam", refusal(kind))
    rule = "with a mirror of the parameters an optimizer works on one layer's parameters at a time and "
    said = refusal(kind, in_turn=True)
    if kind in (OneEstimate, Noise, PythonNoise):  # which go by the order of parameters, the same in turn
        assert said == ""
    else:
        assert re.fullmatch(
            f"{rule}{looks} in turn; use SGD or Adam, or leave parameters on the device", said
        )


@pytest.mark.parametrize("cuts", [1, 3])
def test_a_pipeline_asks_unless_it_has_one_stage(cuts):
    plan, _ = plan_of(Case(model="mlp", cuts=cuts))
    refused = pytest.raises(penstock.PlanError, match="ByTheNorm looks at all together")
    with refused if cuts > 1 else contextlib.nullcontext():
        penstock.Pipeline(build("mlp")[0], plan, loss=cross_entropy, optimizer=ByTheNorm)


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("kind", [*sorted(SEPARABLE, key=str), Alone], ids=lambda kind: kind.__name__)
def test_the_table_of_optimizers_agrees_with_a_trial(kind, in_turn, monkeypatch):
    monkeypatch.setattr(separability, "SEPARABLE", frozenset())
    for settings in ({},) if kind in (Alone, torch.optim.Muon) else ({}, {"foreach": True}):
        named = [(n, p) for n, p in named_parameters() if kind is not torch.optim.Muon or p.dim() == 2]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert refusal(lambda n, extra=settings: kind(n, **extra), in_turn=in_turn, named=named) == ""


def test_the_table_has_all_of_torch_but_those_that_are_not_separable_or_sparse():
    listed = {one for one in vars(torch.optim).values() if isinstance(one, type)}
    listed = {one for one in listed if issubclass(one, torch.optim.Optimizer)}
    others = {torch.optim.Optimizer, torch.optim.LBFGS, torch.optim.SparseAdam}
    assert listed - others == SEPARABLE


class MySgd(torch.optim.SGD):
    """Counts its steps in one number for all."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.9
        return super().step(closure)


def hooked(named):
    """Scales all gradients by their norm, ahead of each step."""
    made = torch.optim.SGD(named, lr=0.1)
    parameters = [p for _, p in named]

    def clip(*_):
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    made.register_step_pre_hook(clip)
    return made


def patched(named):
    made = torch.optim.SGD(named, lr=0.1)
    parameters, step = [p for _, p in named], made.step

    def clipped(*given):
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        return step(*given)

    setattr(made, "step", clipped)  # noqa: B010
    return made


def test_what_only_begins_as_an_optimizer_of_torch_is_tried():
    assert "MySgd looks at all together" in refusal(lambda n: MySgd(n, lr=0.1), in_turn=True)
    assert "SGD looks at all together" in refusal(hooked)
    assert "SGD looks at all together" in refusal(patched)
    assert "SGD has hooks on its steps" in refusal(hooked, in_turn=True)

    def clip(made, *_):
        torch.nn.utils.clip_grad_norm_(made.param_groups[0]["params"], 1.0)

    with register_optimizer_step_pre_hook(clip):
        assert "SGD looks at all together" in refusal(lambda n: torch.optim.SGD(n, lr=0.1))


@pytest.mark.parametrize(
    "optimizer",
    [
        by_name(0.1),
        lambda named: torch.optim.SGD([p for _, p in named], lr=torch.tensor(0.1)),
        lambda named: torch.optim.SGD([p for _, p in named if p.dim() == 1], lr=0.1),
        lambda named: torch.optim.SGD([p for n, p in named if n.startswith("1.")], lr=0.1),
        lambda named: Alone([p for n, p in named if n.startswith("1.")]),
    ],
)
def test_groups_by_name_and_shape_are_taken(optimizer):
    assert refusal(optimizer) == ""


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


@pytest.mark.parametrize("in_turn", [False, True])
def test_what_cannot_be_tried_is_said_unless_it_is_known_by_name(in_turn):
    """A function may look up its model's own parameters: it takes no small ones in their place."""

    def refuse(kind):
        named = named_parameters()
        rates = {id(p): 0.1 for _, p in named}
        return refusal(
            lambda pairs: kind([{"params": [p], "lr": rates[id(p)]} for _, p in pairs]),
            in_turn=in_turn,
            named=named,
        )

    assert refuse(torch.optim.SGD) == ""
    with pytest.warns(UserWarning, match=r"could not be tried on small ones \(KeyError"):
        assert refuse(ByTheNorm) == ""
    with pytest.warns(UserWarning, match=r"could not be tried on small ones \(TypeError: .*closure"):
        assert refusal(NeedsClosure) == ""


@pytest.mark.parametrize("kind", [torch.optim.Adam, Alone])
def test_trying_draws_nothing_and_touches_nothing(kind):
    named = named_parameters()
    before = [p.detach().clone() for _, p in named]
    states = (torch.get_rng_state(), random.getstate(), str(numpy.random.get_state()))
    called = []

    def optimizer(pairs):
        called.extend(p for _, p in pairs)
        return kind(pairs)

    check_separable(optimizer, named, {name: int(name[0]) for name, _ in named}, [])
    assert len(called) == 2 * len(named)  # all at once, and by stages
    assert not {id(p) for p in called} & {id(p) for _, p in named}
    assert all(torch.equal(p, kept) and p.grad is None for (_, p), kept in zip(named, before, strict=True))
    assert torch.equal(states[0], torch.get_rng_state())
    assert (random.getstate(), str(numpy.random.get_state())) == states[1:]


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
        check_separable(
            lambda n: SomeTogether(n), pairs, {name: i // 40 for i, (name, _) in enumerate(pairs)}, []
        )

    with pytest.raises(penstock.PlanError, match="SomeTogether looks at all together"):
        check(named(3, torch.complex64))
    for settings in ((2, torch.complex64), (3, torch.bfloat16), (3, torch.complex64, False)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check(named(*settings))
