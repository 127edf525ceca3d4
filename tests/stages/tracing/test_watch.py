"""Whatever forward read of a model, wherever it is kept: changed later it is refused, at every step again."""

import argparse
import array
import copy
import ctypes
import functools
import types
from typing import Any

import pytest
import torch
from cases import OPTIMIZERS
from reference import plain_loop, same_bits
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.stages.tracing.contents import contents


class Net(nn.Module):
    def __init__(self, kept=None):
        super().__init__()
        self.a, self.relu, self.b = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)
        self.kept = kept

    def between(self, x):
        return x * self.kept

    def forward(self, x):
        return self.b(self.between(self.relu(self.a(x))))


def made(kept: Any = 2.0, between: Any = None, **parts: Any) -> Any:
    """A model that computes ``between`` its layers, which a test changes alone."""
    torch.manual_seed(1)
    model = type("Made", (Net,), {} if between is None else {"between": between})(kept)
    for name, part in parts.items():
        setattr(model, name, part)
    return model


def batch():
    torch.manual_seed(2)
    return torch.randn(6, 6), torch.randint(3, (6,))


def pipeline(model, cuts=("relu",), **options):
    example = (torch.randn(3, 6),)
    profile = penstock.measure(penstock.trace(model, example, **options), example, repeats=1)
    plan = penstock.partition(profile, cuts=list(cuts), micro_batches=2)
    return penstock.Pipeline(model, plan, loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"])


def plain_losses(model, steps, random=()):
    loop = plain_loop(
        model,
        [batch()] * steps,
        loss=F.cross_entropy,
        optimizer=OPTIMIZERS["sgd"],
        micro_batches=2,
        random=random,
    )
    return (record["loss"] for record in loop)


def refused(pipe, told):
    """At every step again, whatever was compared meanwhile."""
    for _ in range(3):
        with pytest.raises(penstock.PlanError, match=told):
            pipe.step(*batch())


class Part(nn.Module):
    scale = 2.0

    def __init__(self):
        super().__init__()
        self.factor, self.table = 2.0, {"k": 2.0}

    def forward(self, x):
        return x * self.factor


def dropped(self, x):
    return F.dropout(x, self.part.p, self.part.training)


def normed(self, x):
    part = self.part
    return F.batch_norm(
        x, part.running_mean, part.running_var, part.weight, part.bias, part.training, part.momentum
    )


CHILDREN = {
    "a dropout's p": (nn.Dropout(0.0), dropped, lambda m: setattr(m.part, "p", 0.9), r"part\.p was 0\.0"),
    "its flag": (nn.Dropout(0.0), dropped, lambda m: m.part.eval(), r"part\.training was True"),
    "a norm's flag": (nn.BatchNorm1d(8), normed, lambda m: m.part.eval(), r"part\.training was True"),
    "a norm's momentum": (
        nn.BatchNorm1d(8),
        normed,
        lambda m: setattr(m.part, "momentum", 0.5),
        r"part\.momentum was 0\.1",
    ),
    "a width": (
        nn.Linear(2, 2),
        lambda self, x: x * self.part.out_features,
        lambda m: setattr(m.part, "out_features", 3),
        r"part\.out_features was 2",
    ),
    "a table of a layer": (
        Part(),
        lambda self, x: self.part(x) * self.part.table["k"],
        lambda m: m.part.table.update(k=3.0),
        r"part\.table\['k'\] has changed since \(2\.0, then 3\.0\)",
    ),
}


@pytest.mark.parametrize("name", CHILDREN)
def test_what_forward_reads_of_a_layer_beside_calling_it_is_held(name):
    part, between, change, told = CHILDREN[name]
    model = made(between=between, part=copy.deepcopy(part))
    pipe = pipeline(model, leaves=["part"])
    pipe.step(*batch())
    change(model)
    refused(pipe, told)


def test_what_a_layer_alone_reads_of_itself_still_counts_at_once():
    model = made(between=lambda self, x: self.part(x), part=Part())
    plain = copy.deepcopy(model)
    pipe, loop = pipeline(model, leaves=[Part]), plain_losses(plain, 2)
    assert pipe.step(*batch()).loss == next(loop)
    model.part.factor = plain.part.factor = 3.0
    model.part.table["k"] = 5.0
    assert pipe.step(*batch()).loss == next(loop)


def test_the_class_of_a_layer_that_forward_reads_is_held(monkeypatch):
    model = made(between=lambda self, x: self.part(x) * self.part.scale, part=Part())
    pipe = pipeline(model, leaves=[Part])
    pipe.step(*batch())
    monkeypatch.setattr(Part, "scale", 3.0)
    refused(pipe, r"Part\.scale has changed")


class Holds(nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, x):
        return x * self.table["k"]


def test_a_refusal_stays_where_somebody_who_does_not_read_it_holds_it_too():
    table = {"k": 2.0}
    model = made(kept=table, between=lambda self, x: self.part(x), part=Holds(table))
    pipe = pipeline(model)
    pipe.step(*batch())
    table["k"] = 5.0
    refused(pipe, r"part\.table\['k'\] has changed since \(2\.0, then 5\.0\)")
    table["k"] = 2.0
    pipe.step(*batch())


class Slotless:
    def __init__(self):
        self.s = 2.0


KEPT = {
    "a Namespace": (
        lambda: argparse.Namespace(s=2.0),
        lambda self, x: x * self.kept.s,
        lambda kept: setattr(kept, "s", 3.0),
    ),
    "an array": (
        lambda: array.array("d", [2.0]),
        lambda self, x: x * self.kept[0],
        lambda kept: kept.__setitem__(0, 3.0),
    ),
    "a value of ctypes": (
        lambda: ctypes.c_double(2.0),
        lambda self, x: x * self.kept.value,
        lambda kept: setattr(kept, "value", 3.0),
    ),
    "an object in a list": (
        lambda: [Slotless()],
        lambda self, x: x * self.kept[0].s,
        lambda kept: setattr(kept[0], "s", 3.0),
    ),
    "a module in a list": (
        lambda: [Part()],
        lambda self, x: self.kept[0](x),
        lambda kept: setattr(kept[0], "factor", 3.0),
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_an_object_on_a_module_holds_is_held(name):
    make, between, change = KEPT[name]
    model = made(kept=make(), between=between)
    pipe = pipeline(model)
    pipe.step(*batch())
    change(model.kept)
    refused(pipe, "kept.* has changed since")


def test_a_dict_seen_through_a_view_is_held():
    table = {"k": 2.0}
    watched = contents
    view = types.MappingProxyType(table)
    before = watched(view, name="view")
    table["k"] = 3.0
    assert before["view['k']"] != watched(view, name="view")["view['k']"]


@pytest.mark.parametrize("name", KEPT)
def test_what_an_object_on_a_module_holds_may_change_before_the_pipeline_is_made(name):
    make, between, change = KEPT[name]
    model, example = made(kept=make(), between=between), (torch.randn(3, 6),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    plan = penstock.partition(profile, cuts=["relu"], micro_batches=2)
    change(model.kept)
    wanted = next(plain_losses(copy.deepcopy(model), 1))
    pipe = penstock.Pipeline(model, plan, loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"])
    assert pipe.step(*batch()).loss == wanted


@pytest.mark.parametrize(
    "between",
    [
        lambda self, x: x * vars(self)["kept"],
        lambda self, x: x * self.__dict__.get("kept"),
    ],
)
def test_what_forward_reads_through_the_dict_of_a_module_is_held(between):
    model = made(between=between)
    pipe = pipeline(model)
    pipe.step(*batch())
    model.kept = 3.0
    refused(pipe, r"the model\.kept was 2\.0")


class Scaled(Net):
    scale = 2.0

    def between(self, x):
        return x * self.scale


class Heir(Scaled):
    pass


@pytest.mark.parametrize("name", ["scale", "between"])
def test_a_class_that_gets_what_only_its_base_had_is_refused(monkeypatch, name):
    torch.manual_seed(1)
    pipe = pipeline(Heir())
    monkeypatch.setattr(Heir, "unread", 1, raising=False)
    pipe.step(*batch())
    monkeypatch.setattr(Heir, name, 3.0 if name == "scale" else lambda self, x: x, raising=False)
    refused(pipe, rf"Heir\.{name} has changed since \(nothing")


class Plain(nn.Module):
    """In the place of a ReLU: nothing stops a gradient."""

    def forward(self, x):
        return x * 1.0


class Passing(nn.ReLU):
    def forward(self, input):
        return input * 1.0


def another_class(kind, monkeypatch, model):
    model.relu.__class__ = kind


def another_forward(monkeypatch, model):
    monkeypatch.setattr(nn.ReLU, "forward", Plain.forward)


OTHERS = [
    functools.partial(another_class, Plain),
    functools.partial(another_class, Passing),
    another_forward,
]


@pytest.mark.parametrize("change", OTHERS)
def test_a_relu_whose_zeros_stop_gradients_must_stay_one(change, monkeypatch):
    model = made(between=lambda self, x: x)
    pipe = pipeline(model)
    pipe.step(*batch())
    change(monkeypatch, model)
    refused(pipe, "a gradient may stay behind where relu gives zeros")
    monkeypatch.undo()
    model.relu.__class__ = nn.ReLU
    pipe.step(*batch())


def test_the_function_that_such_a_relu_calls_must_stay_one(monkeypatch):
    pipe = pipeline(made())
    monkeypatch.setattr(F, "relu", lambda x, inplace=False: x * 1.0)
    refused(pipe, r"a gradient may stay behind .* torch\.nn\.functional")


def doubled(module, args, output):
    return output * 2


def tripled(module, args, output):
    return output * 3


def test_a_hook_of_a_container_exchanged_under_its_handle_is_refused():
    model = made(between=lambda self, x: self.part(x), part=nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    handle = model.part.register_forward_hook(doubled)
    pipe = pipeline(model)
    pipe.step(*batch())
    model.part._forward_hooks[handle.id] = tripled
    refused(pipe, "the trace went through part, and its .* hooks")


def test_a_hook_of_a_layer_may_come_go_and_be_exchanged():
    model = made()
    plain = copy.deepcopy(model)
    pipe, loop = pipeline(model), plain_losses(plain, 4)
    for hook in (doubled, tripled, None, doubled):
        for each in (model, plain):
            each.b._forward_hooks.clear()
            if hook is not None:
                each.b._forward_hooks[7] = hook
        assert pipe.step(*batch()).loss == next(loop)
    assert all(same_bits(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_whether_a_parameter_is_trained_is_held_where_forward_asks():
    def between(self, x):
        return x * 2 if self.a.weight.requires_grad else x

    model = made(between=between)
    pipe = pipeline(model)
    pipe.step(*batch())
    model.b.requires_grad_(False)  # nobody asked
    pipe.step(*batch())
    model.a.requires_grad_(False)
    refused(pipe, r"forward read whether a\.weight requires a gradient .* from True, which is False now")


def test_any_parameter_is_held_where_forward_asks_of_what_it_computed():
    model = made(between=lambda self, x: x * 2 if x.requires_grad else x)
    pipe = pipeline(model)
    pipe.step(*batch())
    model.a.requires_grad_(False)
    refused(pipe, r"forward read whether a\.weight requires a gradient")


def test_a_forward_that_looks_at_gradients_is_refused():
    model = made(between=lambda self, x: x if self.b.weight.grad is None else x * 2)
    with pytest.raises(penstock.PlanError, match=r"reads the gradient of b\.weight, .*test_watch\.py:\d+\)"):
        penstock.trace(model, (torch.randn(3, 6),))
