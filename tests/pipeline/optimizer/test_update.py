"""The update: rounds of all stages, steps of one stage, what a clip and an overflow reach, and refusals."""

import contextlib
import dataclasses
import math
import time
from typing import Any

import pytest
import torch
from cases import OPTIMIZERS, Case, plan_of
from devices import Reads
from torch import nn
from zoo import build, cross_entropy

import penstock
from penstock.pipeline.distributed.process_group import World
from penstock.pipeline.optimizer import clip
from penstock.pipeline.optimizer.error_feedback import PREVIOUS
from penstock.pipeline.optimizer.optimizers import state_per_byte, update_seconds
from penstock.pipeline.optimizer.scale import _unscale
from penstock.pipeline.optimizer.update import Update, _own
from penstock.pipeline.runtime.meter import state_bytes
from penstock.stages.device import CPU
from penstock.stages.weight_versions.versions import WeightVersions


class Log:
    """A policy of the weights that writes down what is asked of it, and hands out gradients."""

    num_live, num_bytes = 1, 0

    def __init__(self, log, stage, parameters, gradients):
        self.log, self.stage = log, stage
        self.parameters, self.gradients = parameters, list(gradients)

    def bind(self, optimizer):
        self.log.append(f"bind {self.stage}")

    def due(self):
        self.log.append(f"due {self.stage}")
        gradient = self.gradients.pop(0)
        for parameter in self.parameters:
            parameter.grad = gradient.clone()

    @contextlib.contextmanager
    def update(self):
        self.log.append(f"update {self.stage}")
        yield
        self.log.append(f"updated {self.stage}")


def made(gradients, **settings):
    """An Update of two stages with one parameter each, its log, and what its SGD of rate 1 wrote."""
    log, parameters = [], [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    weights: Any = {s: Log(log, s, parameters[s : s + 1], gradients[s]) for s in range(2)}
    settings = {"clip": None, "scheduler": None, **settings}
    update = Update(
        world=World(),
        parameters={s: [(f"p{s}", parameters[s])] for s in range(2)},
        owner={f"p{s}": 0 for s in range(2)},
        every=[(f"p{s}", parameters[s]) for s in range(2)],
        weights=weights,
        optimizer=lambda named: torch.optim.SGD(named, lr=1.0),
        **settings,
    )
    return update, log, parameters


def of(*values):
    return [torch.tensor([float(value)]) for value in values]


def test_errors_are_fed_back_from_the_first_delayed_update_to_a_drain_past_what_is_skipped():
    series = of(1, 3, math.inf, 6, 10, 1, 3, 6)
    update, _, parameters = made([series, of(*range(8))], error_feedback=True, scaler=1.0)
    values = []
    for number in range(8):
        if number == 5:
            update.begin()
        update.step(0)
        update.step(1)
        values.append(-float(parameters[0].detach()))
        assert all(PREVIOUS not in kept["state"] for kept in update.state().values())
    assert values == [1, 4, 4, 4 + 9, 13 + 14, 28, 31, 31 + 9]


def test_the_first_update_of_a_round_finds_the_gradients_of_all_stages():
    update, log, _ = made([of(3, 30), of(4, 40)], clip=0.5)
    for stage in (0, 1, 1, 0):  # another stage opens the second round
        update.step(stage)
    assert log == [
        *("bind 0", "bind 1", "due 0", "due 1", "update 0", "updated 0", "update 1", "updated 1"),
        *("due 0", "due 1", "update 1", "updated 1", "update 0", "updated 0"),
    ]


@pytest.mark.parametrize(("together", "expected"), [(True, [-2.0, -2.0]), (False, [-3.0, -2.0])])
def test_an_overflow_skips_its_round_or_its_own_update(together, expected):
    update, log, parameters = made(
        [of(4, 8), of(float("inf"), 8)],
        scaler=4.0,
        together=together,
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, gamma=1.0),
    )
    ticks = []
    for _ in range(2):
        for stage in (0, 1):
            update.step(stage)
        assert update.scheduler is not None
        ticks.append([*update.scheduler.num_steps.values()])
    assert ticks == ([[0, 0], [1, 1]] if together else [[1, 0], [2, 1]])
    assert log.count("update 1") == 2  # it counts as an update of the versions
    assert [parameter.item() for parameter in parameters] == expected


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"clip": 1.0}, "no moment at which all stages hold the same step; take clip_scope=stage"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "give scaler a number, such as 1024"),
        ({"clip": 1.0, "clip_scope": "rank"}, "clip_scope is one of global, stage, found 'rank'"),
        ({"clip": 1.0, "clip_scope": "stage", "scaler": 2.0}, ""),
        ({"scaler": torch.amp.GradScaler("cpu", enabled=False)}, ""),
    ],
)
def test_without_a_flush_nothing_is_asked_of_all_stages_at_once(given, told):
    plan, _ = plan_of(Case(model="mlp", cuts=3))
    plan = dataclasses.replace(plan, schedule="async_1f1b", weights="stashed")
    model, _ = build("mlp")
    refused = pytest.raises(penstock.PlanError, match=told) if told else contextlib.nullcontext()
    with refused:
        penstock.Pipeline(model, plan, loss=cross_entropy, optimizer=OPTIMIZERS["sgd"], **given)


META = torch.device("meta")


@pytest.fixture
def gradients():
    found = {}
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float64, torch.float32)):
        found[f"p{i}"] = nn.Parameter(torch.zeros(33, 5, dtype=dtype))
        found[f"p{i}"].grad = torch.randn(33, 5, dtype=torch.float64).to(dtype)
    found["none"] = nn.Parameter(torch.zeros(3))
    return found


def test_norms_that_are_asked_together_are_those_that_are_asked_one_by_one(gradients, monkeypatch):
    gradients = {name: p.grad for name, p in gradients.items() if p.grad is not None}
    one_by_one = clip.norms(gradients)
    monkeypatch.setattr(clip, "is_gpu", lambda device: True)
    with Reads() as reads:
        together = clip.norms(gradients)
    assert together == one_by_one
    assert reads.count == 0  # one copy of all norms of a dtype, none of each


def test_an_overflow_is_asked_once_for_all_gradients_of_a_device(gradients):
    tensors = [p.grad for p in gradients.values() if p.grad is not None]
    expected = [t.double().mul(1 / 8).to(t.dtype) for t in tensors]
    scale = torch.tensor(8.0)
    with Reads() as reads:
        assert not _unscale(tensors, scale)
    assert reads.count == 2  # the scale, which the host has, and the verdict
    assert all(map(torch.equal, tensors, expected))
    tensors[2][0, 0] = float("inf")
    assert _unscale(tensors, scale)
    assert not _unscale([], scale)


def test_what_an_optimizer_keeps_is_loaded_to_where_it_is_asked_for():
    moment = torch.randn(3, 5).t()
    there = _own(moment, META)
    assert (there.is_meta, there.stride()) == (True, moment.stride())
    here = _own(moment, CPU)
    assert torch.equal(here, moment)
    assert here.data_ptr() != moment.data_ptr()
    assert _own([1, 2], META) == [1, 2]


@pytest.mark.parametrize(("options", "step"), [({}, "cpu"), ({"capturable": True}, "meta")])
def test_a_number_of_steps_stays_with_the_host_unless_kernels_count_them(options, step):
    weight = nn.Parameter(torch.zeros(3, device=META))
    update = Update(
        world=World(),
        parameters={0: [("w", weight)]},
        owner={"w": 0},
        weights={0: WeightVersions()},
        optimizer=lambda named: torch.optim.Adam(named, lr=0.1),
        scheduler=None,
        every=[("w", weight)],
        clip=None,
    )
    group = {**update.state()["w"]["group"], **options}
    kept = {"step": torch.tensor(4.0), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.tensor(1.0)}
    update.load_kept({"w": {"state": kept, "group": group}}, has=lambda _: True)
    (made,) = update.optimizers.values()
    found = {name: item.device.type for name, item in made.state[weight].items()}
    assert found == {"step": step, "exp_avg": "meta", "exp_avg_sq": "meta"}


SGD, Adam = torch.optim.SGD, torch.optim.Adam


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda named: SGD(named, lr=0.1), 0.0),
        (lambda named: SGD(named, lr=0.1, momentum=0.9), 1.0),
        (lambda named: Adam(named), 2.0),
        (lambda named: Adam(named, amsgrad=True), 3.0),
        (lambda named: torch.optim.RMSprop(named), 1.0),
    ],
)
def test_what_is_kept_for_each_byte_is_what_a_run_keeps(make, expected):
    assert state_per_byte(make) == expected
    weight = torch.nn.Parameter(torch.ones(32, 32))
    weight.grad = torch.ones_like(weight)
    made = make([("weight", weight)])
    made.step()
    assert state_bytes([weight], made) - 2 * weight.nbytes == pytest.approx(expected * weight.nbytes, abs=8)


def test_an_optimizer_that_takes_only_its_own_parameters_tells_nothing():
    assert state_per_byte(lambda named: SGD([dict(named)["encoder.bias"]], lr=0.1)) is None
    assert state_per_byte(lambda named: torch.optim.LBFGS([p for _, p in named])) is None


def test_an_optimizer_shows_what_an_update_takes():
    calls = []

    class Slow(SGD):
        def step(self, closure=None):
            calls.append(len(self.param_groups[0]["params"]))
            time.sleep(0.02)
            return super().step(closure)

    found = update_seconds(lambda named: Slow([p for _, p in named], lr=0.1), num_bytes=8 << 20)
    assert calls == [8] * 4  # of 1 MiB each
    assert found is not None
    assert 0.02 / (8 << 20) <= found < 1e-6
    assert update_seconds(lambda named: torch.optim.LBFGS([p for _, p in named])) is None


class Noisy(SGD):
    """Draws in every step, and keeps what it has in a dict of its own."""

    def step(self, closure=None):
        torch.rand(3)
        self.__dict__["state"] = {}


def test_a_look_at_an_optimizer_moves_no_random_state():
    before = torch.get_rng_state()
    assert state_per_byte(lambda named: Noisy([p for _, p in named], lr=0.1)) is None
    assert torch.equal(torch.get_rng_state(), before)
