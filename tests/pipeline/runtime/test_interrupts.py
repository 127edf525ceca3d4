"""A step that breaks off leaves all of its update or nothing, or the pipeline refuses to go on."""

import contextlib
import copy
import dataclasses
import faulthandler
import os
import pickle
import random
import signal
import threading
from typing import Any

import pytest
import torch
from cases import Case, pipeline_with_batches, plan_of
from law import everything_leaves
from reference import same_tree
from sampling import is_whole
from small_pipelines import pipeline_of
from torch import nn
from zoo import build

import penstock
from penstock import PenstockError, StageError

CASE = Case(model="mlp", cuts=3, steps=2)
TIERS = [{}, {"tier": "disk", "parameters_tier": "disk"}]
OTHERS = [{"tier": "packed"}, {"tier": "host"}, {"tier": "disk"}, {"parameters_tier": "host"}]
OTHERS += [{"parameters_tier": "disk"}, {"schedule": "zb_h1", "scheduler": True}]


def same(pipe, state):
    found = pipe.state_dict()
    return found["step"] == state["step"] and same_tree(found["model"], state["model"])


@contextlib.contextmanager
def interrupts(*seconds):
    """Press Ctrl-C after so many seconds each, while the block runs or behind it."""
    timers = [threading.Timer(one, os.kill, (os.getpid(), signal.SIGINT)) for one in seconds]
    for timer in timers:
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.join()


@pytest.mark.parametrize(
    "tiers", [*TIERS, *(pytest.param(tiers, marks=pytest.mark.slow) for tiers in OTHERS)], ids=str
)
def test_a_storm_of_interrupts_leaves_whole_steps(tiers, monkeypatch, pytestconfig):
    case = dataclasses.replace(CASE, **tiers)
    everything_leaves(monkeypatch)
    plain, batches = pipeline_with_batches(case)
    states, seconds = [plain.state_dict()], 0.0
    for batch in (*batches, *batches):
        seconds = plain.step(*batch).seconds
        states.append(plain.state_dict())
    pipe, _ = pipeline_with_batches(case)
    chance, seen = random.Random(0), set()
    for _ in range(500 if is_whole(pytestconfig) else 20):
        faulthandler.dump_traceback_later(60, exit=True)
        if pipe.num_steps == len(states) - 1:
            pipe.load_state_dict(states[0])
        before = pipe.num_steps
        pause = chance.uniform(0.1, 1.5) * chance.choice((1, 12)) * seconds  # some steps are watched
        with pytest.raises(KeyboardInterrupt), interrupts(pause):
            pipe.step(*batches[before % 2])
        seen.add(pipe.num_steps - before)
        assert same(pipe, states[pipe.num_steps])
    faulthandler.cancel_dump_traceback_later()
    assert seen == {0, 1}
    pipe.close()
    plain.close()


class Slow(nn.Module):
    """Waits in its forward for what presses Ctrl-C a second time."""

    at: Any = None

    def forward(self, x):
        if self.at is not None:
            threading.Event().wait(self.at)
        return x * 1


def slow_pipeline():
    model, x = nn.Sequential(nn.Linear(4, 4), Slow()), torch.randn(4, 4)
    settings = {"stages": 2, "micro_batches": 1, "loss": lambda y, _: y.sum()}
    return pipeline_of(model, example=(x,), leaves=["1"], **settings), x


def test_a_pipeline_is_for_one_thread_at_a_time(monkeypatch):
    pipe, x = slow_pipeline()
    monkeypatch.setattr(Slow, "at", 1.0)
    other = threading.Thread(target=pipe.step, args=(x, x))
    other.start()
    threading.Event().wait(0.3)
    for use in (lambda: pipe.step(x, x), pipe.state_dict, lambda: pipe.evaluate(x)):
        with pytest.raises(StageError, match="another thread uses it now"):
            use()
    other.join()
    assert pipe.num_steps == 1
    pipe.step(x, x)
    pipe.close()


def test_a_second_interrupt_ends_it_at_once_and_nothing_goes_on(monkeypatch):
    pipe, x = slow_pipeline()
    monkeypatch.setattr(Slow, "at", 20.0)
    with pytest.raises(KeyboardInterrupt), interrupts(0.2, 0.4):
        pipe.step(x, x)
    for go_on in (lambda: pipe.step(x, x), pipe.state_dict, lambda: penstock.save(pipe, "there")):
        with pytest.raises(StageError, match="interrupted in the middle of an instruction does nothing more"):
            go_on()


class Failing(torch.optim.SGD):
    """One whose step fails once, of the second stage."""

    fails = False

    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        if Failing.fails and any(p.shape == torch.Size([10]) for p in self.param_groups[0]["params"]):
            raise ValueError("sky")
        return super().step(closure)


def test_an_update_that_fails_halfway_is_gone_on_from_by_a_state_alone(tmp_path, monkeypatch):
    model, batches = build("mlp", None, 2)
    options = {"loss": nn.functional.cross_entropy, "optimizer": lambda named: Failing(named, lr=0.1)}
    plan = plan_of(CASE)[0]
    pipe = penstock.Pipeline(model, plan, **options)
    pipe.step(*batches[0])
    penstock.save(pipe, tmp_path / "kept")
    good = pipe.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(Failing, "fails", True)
        with pytest.raises(PenstockError, match="sky"):
            pipe.step(*batches[1])
    told = "the update of step 1 was broken off by StageError, so weights are of two steps; load a"
    for go_on in (
        lambda: pipe.step(*batches[1]),
        lambda: pipe.evaluate(batches[1][0]),
        pipe.state_dict,
        lambda: penstock.save(pipe, tmp_path / "more"),
    ):
        with pytest.raises(StageError, match=told):
            go_on()
    penstock.load(pipe, tmp_path / "kept")
    assert same(pipe, good)
    pipe.step(*batches[1])
    whole = pipe.state_dict()
    pipe.load_state_dict(good)
    pipe.step(*batches[1])
    assert same(pipe, whole)


def test_a_pipeline_is_not_copied_and_does_nothing_more_once_it_is_closed():
    pipe, batches = pipeline_with_batches(CASE)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(PenstockError, match="a pipeline is not copied or pickled; save it"):
            copied(pipe)
    state = pipe.state_dict()
    pipe.close()
    pipe.close()
    for go_on in (
        lambda: pipe.step(*batches[0]),
        lambda: pipe.evaluate(batches[0][0]),
        lambda: pipe.load_state_dict(state),
    ):
        with pytest.raises(StageError, match="was closed does nothing more; make another one"):
            go_on()
