"""What forward reads from outside of the model: globals and closures, held to what they were when traced."""

import argparse
import contextvars
import cProfile
import os
import pstats
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock
from penstock import PlanError

SCALE, TABLE, UNREAD = 2.0, {"shift": 1}, 5


def shifted(x):
    return x + TABLE["shift"]


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.UNREAD = nn.Linear(4, 3), 1

    def forward(self, x):
        return self.linear(shifted(x) * SCALE * self.UNREAD)


def pipe_of(model):
    example = (torch.randn(3, 4),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    plan = penstock.partition(profile, stages=2, micro_batches=2)
    return penstock.Pipeline(
        model, plan, loss=F.cross_entropy, optimizer=lambda named: torch.optim.SGD(named, lr=0.1)
    )


def step(pipe):
    return pipe.step(torch.randn(6, 4), torch.randint(3, (6,)))


def test_a_global_that_forward_read_is_held_to_what_it_was(monkeypatch):
    pipe = pipe_of(Reads())
    monkeypatch.setitem(globals(), "UNREAD", 6)  # an attribute has that name
    monkeypatch.setitem(globals(), "SCALE", float("2.0"))
    step(pipe)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    with pytest.raises(PlanError, match=r"goes on from SCALE, which its code \(.*test_outside.py:\d+\) read"):
        step(pipe)
    with pytest.raises(PlanError, match="goes on from SCALE"):
        pipe.evaluate(torch.randn(2, 4))
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    step(pipe)


def test_a_table_that_a_function_of_the_model_read_is_held_to_what_it_was(monkeypatch):
    pipe = pipe_of(Reads())
    monkeypatch.setitem(TABLE, "shift", 2)
    with pytest.raises(PlanError, match="goes on from TABLE"):
        step(pipe)


def test_a_function_of_the_model_that_is_exchanged_is_refused(monkeypatch):
    pipe = pipe_of(Reads())
    monkeypatch.setitem(globals(), "shifted", lambda x: x)
    with pytest.raises(PlanError, match="goes on from shifted"):
        step(pipe)


def test_a_variable_of_a_function_around_forward_is_held_to_what_it_was():
    scale = 2.0

    class Inside(Reads):
        def forward(self, x):
            return self.linear(x * scale)

    pipe = pipe_of(Inside())
    step(pipe)
    scale = 3.0
    with pytest.raises(PlanError, match="goes on from scale"):
        step(pipe)


def test_a_model_is_traced_anew_where_what_it_read_is_another(monkeypatch):
    model, example = Reads(), (torch.randn(3, 4),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    plan = penstock.partition(profile, stages=2, micro_batches=2)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    pipe = penstock.Pipeline(
        model, plan, loss=F.cross_entropy, optimizer=lambda named: torch.optim.SGD(named, lr=0.1)
    )
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    with torch.no_grad():
        expected = sum(
            F.cross_entropy(model(part), t) * 0.5 for part, t in zip(x.split(3), y.split(3), strict=True)
        )
    assert pipe.step(x, y).loss == pytest.approx(float(expected), rel=1e-6)


class Settings:
    scale = 2.0
    nested = {"deep": {"scale": 2.0}}  # noqa: RUF012
    tensor = torch.tensor(2.0)

    def method(self):
        return self.scale


SETTINGS = Settings()


DEFAULT = {"scale": 1.0}


def helper(x, more=(2.0,), *, table=DEFAULT):
    return x * more[0] * table["scale"]


class Objects(Reads):
    def forward(self, x):
        x = helper(x) * SETTINGS.scale * SETTINGS.nested["deep"]["scale"] * Settings.tensor
        return self.linear(self.scaled(x))

    def scaled(self, x):
        return F.gelu(x) * SETTINGS.method()


CHANGES = {
    "an attribute": lambda patch: patch.setattr(SETTINGS, "scale", 3.0),
    "a nested table": lambda patch: patch.setitem(SETTINGS.nested["deep"], "scale", 3.0),
    "a tensor in place": lambda patch: Settings.tensor.add_(0),
    "a function of a module": lambda patch: patch.setattr(F, "gelu", F.relu),
    "a method of the model": lambda patch: patch.setattr(Objects, "scaled", lambda self, x: x),
    "a default": lambda patch: patch.setattr(helper, "__defaults__", ((3.0,),)),
    "a table that is a default": lambda patch: patch.setitem(DEFAULT, "scale", 3.0),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_hangs_on_what_forward_reads_is_held_to_what_it_was(kind, monkeypatch):
    pipe = pipe_of(Objects())
    step(pipe)
    CHANGES[kind](monkeypatch)
    with pytest.raises(PlanError, match="forward goes on from"):
        step(pipe)


class Held:
    kind = 2.0

    def __init__(self):
        self.scale = 2.0

    @property
    def shown(self):
        return self.scale

    def asked(self):
        return self.scale


HELD, ROW, CONTEXT = Held(), [Held()], contextvars.ContextVar("CONTEXT", default=2.0)
NAMESPACE = argparse.Namespace(scale=2.0)


def aliased():
    held = HELD
    return held.scale * held.kind


def held_scale(patch):
    patch.setattr(HELD, "scale", 3.0)


def in_context(patch):
    CONTEXT.set(3.0)


OBJECTS = {
    "a list of objects": (lambda: ROW[0].scale, lambda patch: patch.setattr(ROW[0], "scale", 3.0), "ROW"),
    "a local name": (aliased, held_scale, "HELD"),
    "its class": (aliased, lambda patch: patch.setattr(Held, "kind", 3.0), "HELD"),
    "a property": (lambda: HELD.shown, held_scale, "HELD"),
    "a method": (lambda: HELD.asked(), held_scale, "HELD"),
    "a namespace": (
        lambda: NAMESPACE.scale,
        lambda patch: patch.setattr(NAMESPACE, "scale", 3.0),
        "NAMESPACE",
    ),
    "a context variable": (CONTEXT.get, in_context, "scale"),
    "a context variable by name": (lambda: CONTEXT.get(), in_context, "CONTEXT"),
    "the environment": (
        lambda: float(os.environ["PENSTOCK_SCALE"]),
        lambda patch: patch.setenv("PENSTOCK_SCALE", "3"),
        r"os\.environ\['PENSTOCK_SCALE'\]",
    ),
    "a variable that is not set": (
        lambda: float(os.getenv("PENSTOCK_NONE", "2")),
        lambda patch: patch.setenv("PENSTOCK_NONE", "3"),
        r"os\.environ\['PENSTOCK_NONE'\]",
    ),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_what_objects_around_the_model_hold_is_held_to_what_it_was(kind, monkeypatch):
    scale, change, told = OBJECTS[kind]
    monkeypatch.setenv("PENSTOCK_SCALE", "2")
    CONTEXT.set(2.0)

    class Around(Reads):
        def forward(self, x):
            return self.linear(x * scale())

    pipe = pipe_of(Around())
    monkeypatch.setenv("PENSTOCK_OTHER", "1")  # nobody reads it
    step(pipe)
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        for _ in range(2):
            with pytest.raises(PlanError, match=f"goes on from {told}"):
                step(pipe)
    CONTEXT.set(2.0)
    step(pipe)


def test_a_profiler_goes_on_and_sees_the_trace():
    profiler = cProfile.Profile()
    profiler.enable()
    penstock.trace(torch.nn.Linear(4, 4), (torch.ones(3, 4),))
    assert sys.getprofile() is profiler
    profiler.disable()
    assert "trace" in pstats.Stats(profiler).get_stats_profile().func_profiles
