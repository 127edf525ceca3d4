"""Facts that a trace read, on the model or around it, are guarded: a change makes steps and evaluations
refuse.
"""

import argparse
import array
import contextvars
import copy
import cProfile
import ctypes
import gc
import json
import operator
import os
import pickle
import pstats
import sys
import types
import weakref
from typing import Any

import pytest
import torch
from cases import OPTIMIZERS
from reference import plain_loop, same_bits
from small_pipelines import batch, built, differences, evaluated, model_of, nothing, pipeline_of, profile_of
from torch import fx, nn
from torch.nn import functional as F
from zoo import cross_entropy

import penstock
from penstock.stages.plan.plan import Plan
from penstock.stages.profiling.examples import graph_of


class Factor(nn.Module):
    scale = 2.0

    def __init__(self):
        super().__init__()
        self.factor, self.table = 2.0, {"k": 2.0}

    def forward(self, x):
        return x * self.factor


class Scaled(nn.Module):
    """A container that reads numbers, a list, a table and its class."""

    kind = 2.0

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), 0.5
        self.powers, self.table = [1.0, 2.0], {"shift": torch.ones(8)}

    def forward(self, x):
        y = self.linear(x) * self.scale * self.powers[1] + self.table["shift"]
        return torch.tanh(y) * self.kind


@fx.wrap
def halved(x, training):
    """A function that is given a container's flag, as torchvision's stochastic_depth is."""
    return x * (0.5 if training else 1.0)


class Thing:
    """An object of a person's own."""

    kind, nested, tensor = 2.0, {"deep": {"scale": 2.0}}, torch.tensor(2.0)

    def __init__(self):
        self.scale = 2.0

    @property
    def shown(self):
        return self.scale

    def asked(self):
        return self.scale


class Net(nn.Module):
    """Holds a bit of everything; each test reads one of these ``between`` two layers."""

    scale = 2.0

    def __init__(self):
        super().__init__()
        self.a, self.relu, self.b = nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)
        self.drop, self.norm, self.wide = nn.Dropout(0.0), nn.BatchNorm1d(8), nn.Linear(2, 2)
        self.leaf, self.scaled = Factor(), Scaled()
        self.flagged = model_of(lambda self, x: halved(x, self.training))
        self.shared = {"k": 2.0}  # which only the part reads
        self.part = model_of(lambda self, x: x * self.table["k"], table=self.shared)
        self.kept, self.zero, self.parameter = 2.0, 0.0, nn.Parameter(torch.ones(8))
        self.space, self.array = argparse.Namespace(s=2.0), array.array("d", [2.0])
        self.number = ctypes.c_double(2)
        self.things, self.hidden, self.UNREAD = [Thing()], [Factor()], 2

    def between(self, x):
        return x * self.kept * self.scale + self.zero

    def forward(self, x):
        return self.b(self.between(self.relu(self.a(x))))


def net_of(between=Net.between) -> Any:
    own = {} if between is Net.between else {"between": between}
    return built(lambda: type("Made", (Net,), own)())


class Plain(nn.Module):
    """In the place of a ReLU: nothing stops a gradient."""

    def forward(self, x):
        return x * 1.0


class Passing(nn.ReLU):
    def forward(self, input):
        return input * 1.0


SCALE, TABLE, UNREAD, DEFAULT = 2.0, {"shift": 1}, 5, {"scale": 1.0}
VIEWED = {"k": 2.0}
VIEW, ALIASED, SHOWN, ASKED = types.MappingProxyType(VIEWED), Thing(), Thing(), Thing()
THING, ROW, NAMESPACE = Thing(), [Thing()], argparse.Namespace(scale=2.0)
CONTEXT = contextvars.ContextVar("CONTEXT", default=2.0)
OTHER_CONTEXT = contextvars.ContextVar("OTHER_CONTEXT", default=2.0)
get_value = OTHER_CONTEXT.get


def shifted(x):
    return x + TABLE["shift"]


def with_defaults(x, more=(2.0,), *, table=DEFAULT):
    return x * more[0] * table["scale"]


def reads_layers(self, x):
    """Of layers beside calling them, or without."""
    norm = self.norm
    x = F.dropout(x, self.drop.p, self.drop.training) * self.wide.out_features
    x = F.batch_norm(x, norm.running_mean, norm.running_var, training=norm.training, momentum=norm.momentum)
    return self.leaf(x) * self.leaf.table["k"] * self.leaf.scale


def reads_objects(self, x):
    return self.hidden[0](x) * self.space.s * self.number.value * self.things[0].scale


def reads_parts(self, x):
    return self.part(self.flagged(self.scaled(x)))


def reads_around(self, x):
    held = ALIASED
    x = with_defaults(shifted(F.gelu(x))) * SCALE * held.scale * held.kind * VIEW["k"] * ROW[0].scale
    x = x * THING.scale * THING.nested["deep"]["scale"] * SHOWN.shown * ASKED.asked() * NAMESPACE.scale
    x = x * get_value() * CONTEXT.get() * float(os.environ["PENSTOCK_SCALE"])
    return x * float(os.getenv("PENSTOCK_NONE", "2"))


def calls_scaled(self, x):
    return self.scaled(x)


MODEL, CLASS = "", "__class__"  # itself and its class, among the paths of the model


def owner_of(owner, net):
    if owner is MODEL:
        return net
    return operator.attrgetter(owner)(net) if isinstance(owner, str) else owner


def sets(owner, name, value):
    """A change of an attribute, of an object or of what stands under a path of the model."""
    return lambda patch, net: patch.setattr(owner_of(owner, net), name, value, raising=False)


def puts(owner, key, value):
    """The same of an item of a dict."""
    return lambda patch, net: patch.setitem(owner_of(owner, net), key, value)


FREEZES = sets("a.weight", "requires_grad", False)


def all_asleep(net):
    for module in net.modules():
        module.training = False


def unhooked(*_):
    return None


OTHER, ROWS_OF_ONES = nn.Linear(8, 8), nn.Parameter(torch.ones(8, 8))
ZEROS = "a gradient may stay behind where relu gives zeros"
HELD = {  # what forward reads: what a person changes, and what the sentence names
    Net.between: [
        (sets(MODEL, "kept", 0.25), r"kept was 2\.0 .* is 0\.25 now"),
        (sets(MODEL, "kept", torch.tensor(2.0)), r"kept was 2\.0"),
        (sets(MODEL, "zero", -0.0), r"zero was 0\.0 .* is -0\.0 now"),
        (puts("_modules", "b", nn.Linear(8, 3)), "the trace went through the model, .* children"),
        (puts("_parameters", "parameter", nn.Parameter(torch.zeros(8))), "the model, .* own tensors"),
        (sets(CLASS, "scale", 3.0), r"Made\.scale was absent .* is 3\.0 now"),
        (sets(CLASS, "between", lambda self, x: x), r"Made\.between was absent"),
        (
            sets(Net, "forward", lambda self, x: self.b(self.a(x))),
            "the trace went through the model, .* forward",
        ),
        # a ReLU of which it was proved that its zeros stop gradients
        (sets("relu", "__class__", Plain), ZEROS),
        (sets("relu", "__class__", Passing), ZEROS),
        (sets(nn.ReLU, "forward", Plain.forward), ZEROS),
        (puts("relu._forward_hooks", 7, unhooked), ZEROS),
        (
            sets(F, "relu", lambda x, inplace=False: x * 1.0),
            r"torch\.nn\.functional\.relu, behind whose zeros",
        ),
    ],
    lambda self, x: x * vars(self)["kept"]: [(sets(MODEL, "kept", 3.0), r"kept was 2\.0")],
    lambda self, x: x * self.__dict__.get("kept"): [(sets(MODEL, "kept", 3.0), r"kept was 2\.0")],
    lambda self, x: x * 2 if self.a.weight.requires_grad else x: [(FREEZES, "whether a.weight .* False now")],
    lambda self, x: x * 2 if x.requires_grad else x: [
        (FREEZES, "whether a.weight requires a gradient was True")
    ],
    reads_parts: [
        (sets("scaled", "scale", 0.25), r"scaled\.scale was 0\.5 .* is 0\.25 now"),
        (sets("scaled", "scale", True), r"scaled\.scale"),
        (lambda patch, net: patch.delattr(net.scaled, "scale"), r"scaled\.scale .* is absent now"),
        (puts("scaled.table", "shift", torch.zeros(8)), r"scaled\.table\['shift'\]"),
        (sets(Scaled, "kind", 3.0), r"Scaled\.kind"),
        (puts("scaled._modules", "linear", OTHER), "the trace went through scaled, .* children"),
        (puts("scaled.linear._parameters", "weight", ROWS_OF_ONES), r"scaled\.linear\.weight"),
        (puts("scaled._forward_hooks", 7, unhooked), "the trace went through scaled, .* hooks"),
        (puts("flagged.__dict__", "forward", lambda x: x), "the trace went through flagged"),
        (puts("shared", "k", 5.0), r"part\.table\['k'\] was 2\.0 .* is 5\.0 now"),
    ],
    reads_layers: [
        (sets("drop", "p", 0.9), r"drop\.p was 0\.0"),
        (sets("norm", "momentum", 0.5), r"norm\.momentum was 0\.1"),
        (sets("wide", "out_features", 3), r"wide\.out_features was 2"),
        (puts("leaf.table", "k", 3.0), r"leaf\.table\['k'\] was 2\.0 .* is 3\.0 now"),
        (sets(Factor, "scale", 3.0), "Factor.scale was"),
    ],
    reads_objects: [
        (sets("space", "s", 3.0), "space.* was 2"),
        (sets("number", "value", 3.0), "number was a c_double .* is another c_double"),
        (lambda patch, net: patch.setattr(net.things[0], "scale", 3.0), "things.* was 2"),
        (lambda patch, net: patch.setattr(net.hidden[0], "factor", 3.0), "hidden.* was 2"),
    ],
    reads_around: [
        (puts(globals(), "SCALE", 3.0), r"SCALE was 2\.0 .*, its code \(.*test_held.py:\d+\) read"),
        (puts(TABLE, "shift", 2), "TABLE.* was"),
        (puts(VIEWED, "k", 5.0), "VIEW.* was"),
        (puts(globals(), "shifted", lambda x: x), "shifted.* was"),
        (sets(THING, "scale", 3.0), "THING.* was"),
        (puts(Thing.nested["deep"], "scale", 3.0), " was 2"),
        (sets(F, "gelu", F.relu), r"F\.gelu was"),
        (sets(with_defaults, "__defaults__", ((3.0,),)), "__defaults__.* was"),
        (puts(DEFAULT, "scale", 3.0), "__kwdefaults__.* was"),
        (sets(ROW[0], "scale", 3.0), "ROW.* was"),
        (sets(ALIASED, "scale", 3.0), "ALIASED.* was"),
        (sets(Thing, "kind", 3.0), " was 2"),
        (sets(SHOWN, "scale", 3.0), "SHOWN.* was"),
        (sets(ASKED, "scale", 3.0), "ASKED.* was"),
        (sets(NAMESPACE, "scale", 3.0), "NAMESPACE.* was"),
        (lambda patch, net: OTHER_CONTEXT.set(3.0), "get_value.* was"),
        (lambda patch, net: CONTEXT.set(3.0), "CONTEXT.* was"),
        (lambda patch, net: patch.setenv("PENSTOCK_SCALE", "3"), r"os\.environ\['PENSTOCK_SCALE'\] was '2'"),
        (lambda patch, net: patch.setenv("PENSTOCK_NONE", "3"), r"os\.environ\['PENSTOCK_NONE'\] was"),
    ],
}


def reset_contexts():
    for context in (CONTEXT, OTHER_CONTEXT):
        context.set(2.0)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    monkeypatch.setenv("PENSTOCK_SCALE", "2")
    reset_contexts()


def refused(call, subject):
    with pytest.raises(penstock.PlanError, match=subject):
        call()


@pytest.mark.parametrize("between", HELD)
def test_what_forward_read_is_refused_when_it_changes_until_it_is_set_back(between):
    net = net_of(between)
    pipe = pipeline_of(net, cuts=["relu"], leaves=["leaf"])
    pipe.step(*batch())
    for change, subject in HELD[between]:
        with pytest.MonkeyPatch.context() as patch:
            change(patch, net)
            for _ in range(3):  # whatever was compared meanwhile
                refused(lambda: pipe.step(*batch()), subject)
            refused(lambda: pipe.evaluate(batch()[0]), subject)
        reset_contexts()
        pipe.step(*batch())


FLAGS = [
    (reads_parts, lambda net: net.flagged.eval(), r"flagged\.training was True"),
    (reads_parts, all_asleep, r"flagged\.training was True .* is False now"),
    (reads_layers, lambda net: net.drop.eval(), r"drop\.training was True"),
    (reads_layers, lambda net: net.norm.eval(), r"norm\.training was True"),
]


IN_PLACE = [
    (
        calls_scaled,
        lambda net: net.scaled.powers.__setitem__(1, 3.0),
        r"powers\[1\] .*was 2\.0 .* is 3\.0 now",
    ),
    (calls_scaled, lambda net: net.scaled.table["shift"].mul_(2), r"scaled\.table\['shift'\]"),
    (lambda self, x: x * self.array[0], lambda net: net.array.__setitem__(0, 3.0), "array was"),
    (lambda self, x: x * Thing.tensor, lambda net: Thing.tensor.add_(0), r"Thing\.tensor was"),
]


@pytest.mark.parametrize(("between", "change", "subject"), [*FLAGS, *IN_PLACE])
def test_a_flag_that_forward_read_is_set_by_evaluations_and_what_is_written_in_place_is_refused(
    between, change, subject
):
    net = net_of(between)
    pipe = pipeline_of(net, cuts=["relu"])
    pipe.step(*batch())
    change(net)
    for _ in range(2):
        refused(lambda: pipe.step(*batch()), subject)
    if "training" in subject:
        assert same_bits(pipe.evaluate(batch()[0]), evaluated(net, batch()[0]))
    else:
        refused(lambda: pipe.evaluate(batch()[0]), subject)


def test_a_variable_of_a_function_around_forward_is_held():
    scale = 2.0
    net = net_of(lambda self, x: x * scale)
    pipe = pipeline_of(net, cuts=["relu"])
    pipe.step(*batch())
    scale = 3.0
    refused(lambda: pipe.step(*batch()), "scale was")


COUNTS_BEFORE = [
    (lambda self, x: x * SCALE, lambda net: globals().update(SCALE=3.0)),
    (lambda self, x: x * self.space.s, lambda net: setattr(net.space, "s", 3.0)),
    (lambda self, x: x * self.array[0], lambda net: net.array.__setitem__(0, 3.0)),
    (lambda self, x: x * self.number.value, lambda net: setattr(net.number, "value", 3.0)),
    (lambda self, x: x * self.things[0].scale, lambda net: setattr(net.things[0], "scale", 3.0)),
    (lambda self, x: self.hidden[0](x), lambda net: setattr(net.hidden[0], "factor", 3.0)),
]


@pytest.mark.parametrize(("between", "change"), COUNTS_BEFORE)
def test_what_changes_before_the_pipeline_is_made_counts(between, change, monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    net = net_of(between)
    plan = penstock.partition(profile_of(net), cuts=["relu"], micro_batches=3)
    change(net)
    (x, y), settings = batch(), {"loss": cross_entropy, "optimizer": OPTIMIZERS["sgd"]}
    expected = next(plain_loop(copy.deepcopy(net), [(x, y)], micro_batches=3, **settings))
    assert penstock.Pipeline(net, plan, **settings).step(x, y).loss == expected["loss"]


def same_value(net):
    net.scaled.scale = float(str(0.5))  # another object of the same value
    net.scaled.powers = [1.0, 2.0]
    globals()["SCALE"] = float("2.0")


def unread(net):
    net.scaled.extra, net.a.epoch = [1], 1
    globals()["UNREAD"], type(net).unread = 6, 1
    os.environ["PENSTOCK_OTHER"] = "1"
    net.scaled.linear.requires_grad_(False)


def read_by_a_layer_alone(net):
    net.leaf.factor, net.leaf.table["k"] = 3.0, 5.0


def reads_much(self, x):
    asked = x * 2 if self.a.weight.requires_grad else x
    return self.scaled(asked) * SCALE * self.UNREAD


FREE = {
    "the same value": (reads_much, [nothing, same_value, nothing]),
    "what nobody reads": (reads_much, [nothing, unread, unread]),
    "what a layer alone reads": (lambda self, x: self.leaf(x), [nothing, read_by_a_layer_alone]),
    "nothing where a flag is read": (reads_parts, [nothing, nothing]),
}


@pytest.mark.parametrize("name", FREE)
def test_what_no_forward_of_a_container_read_may_change(name, monkeypatch):
    between, changes = FREE[name]
    for item, value in (("UNREAD", 5), ("SCALE", 2.0)):
        monkeypatch.setitem(globals(), item, value)
    monkeypatch.setenv("PENSTOCK_OTHER", "0")
    assert differences(lambda: net_of(between), changes, cuts=["relu"], leaves=["leaf"]) == []


def test_a_forward_that_looks_at_gradients_is_refused():
    net = net_of(lambda self, x: x if self.b.weight.grad is None else x * 2)
    refused(lambda: profile_of(net), r"reads the gradient of b\.weight, .*test_held.py:\d+\)")


def test_a_hook_on_all_modules_and_another_default_dtype_are_refused():
    pipe = pipeline_of(net_of(), cuts=["relu"])
    handle = nn.modules.module.register_module_forward_hook(unhooked)
    try:
        refused(lambda: pipe.step(*batch()), "the set of hooks on all modules")
    finally:
        handle.remove()
    torch.set_default_dtype(torch.float64)
    try:
        refused(lambda: pipe.step(*batch()), r"default dtype was torch\.float32 .* torch\.float64 now")
    finally:
        torch.set_default_dtype(torch.float32)
    pipe.step(*batch())


def test_autocast_around_a_pipeline_is_refused_with_the_option_for_it():
    pipe = pipeline_of(net_of(), cuts=["relu"])
    with torch.autocast("cpu", torch.bfloat16):
        for call in (pipeline_of, lambda net: pipe.step(*batch()), lambda net: pipe.evaluate(batch()[0])):
            refused(lambda call=call: call(net_of()), r"torch\.autocast is on around it; .* autocast= to")
    pipe.step(*batch())


def test_a_profiler_goes_on_and_sees_the_trace():
    profiler = cProfile.Profile()
    profiler.enable()
    penstock.trace(torch.nn.Linear(4, 4), (torch.ones(3, 4),))
    assert sys.getprofile() is profiler
    profiler.disable()
    assert "trace" in pstats.Stats(profiler).get_stats_profile().func_profiles


def test_a_model_that_was_dropped_is_gone():
    model = net_of(lambda self, x: self.scaled(x) * self.things[0].scale)
    pipe = pipeline_of(model, cuts=["relu"])
    gone = [weakref.ref(each) for each in (model, model.scaled, model.things[0])]
    model.epoch = 1
    pipe.step(*batch())
    del model
    gc.collect()
    assert [reference() for reference in gone] == [None, None, None]
    pipe.step(*batch())
    pipe.evaluate(batch()[0])


def test_a_plan_carries_the_graph_of_its_model_while_nothing_that_was_read_changes():
    net = net_of()
    plan = penstock.partition(profile_of(net), cuts=["relu"], micro_batches=3)
    assert graph_of(net, plan, None) is plan.graph
    assert graph_of(copy.deepcopy(net), plan, None) is not plan.graph
    assert (pickled := pickle.loads(pickle.dumps(plan))) == plan
    assert pickled.graph is None, "it holds functions, and belongs to this process"
    assert graph_of(net, Plan.of_json(json.loads(json.dumps(plan.to_json())), "here"), None) is not plan.graph
    net.kept = 3.0
    assert graph_of(net, plan, None) is not plan.graph
