"""Compiled pieces: one layer each, and the bits of the plain loop over the same pieces."""

import concurrent.futures
import contextlib
import shutil
import threading
from typing import cast

import pytest
import torch
import zoo
from cases import Case, parameters, profile_of
from law import differences
from small_pipelines import pipeline_of
from torch import nn
from torchvision.models.resnet import BasicBlock

import penstock
from penstock.stages.tracing.model_checks import as_written

pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # torch's own, while it compiles
)
AOT = "aot_eager"  # forward and backward are traced ahead of time, and run without a compiler


class Net(nn.Module):
    """A small residual network; pieces are compiled both ways."""

    def __init__(self, backend):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.layer1 = torch.compile(nn.Sequential(BasicBlock(8, 8), nn.ReLU()), backend=backend)
        self.layer2, self.layer3 = BasicBlock(8, 8), BasicBlock(8, 8)
        self.head = torch.compile(nn.Linear(8, 10), backend=backend)
        self.layer2.compile(backend=backend)

    def forward(self, x):
        x = self.layer1(torch.relu(self.norm(self.stem(x))))
        return self.head(self.layer3(self.layer2(x)).mean((2, 3)))


def compiled(module, backend):
    """The result of ``torch.compile`` of a module is a module, which its annotation does not say."""
    return cast("nn.Module", torch.compile(module, backend=backend))


def mlp(backend):
    start, middle, end = nn.Linear(192, 33), nn.Sequential(nn.ReLU(), nn.Linear(33, 17)), nn.Linear(17, 10)
    return nn.Sequential(nn.Flatten(1), start, compiled(middle, backend), nn.ReLU(), end)


class Tied(nn.Module):
    """A weight that a compiled piece reads, and a plain one behind it."""

    def __init__(self, backend):
        super().__init__()
        self.start, self.tied, self.end = nn.Linear(192, 16), nn.Linear(16, 16), nn.Linear(16, 10)
        self.piece = torch.compile(nn.Sequential(nn.Tanh(), self.tied), backend=backend)

    def forward(self, x):
        return self.end(torch.relu(self.tied(self.piece(self.start(x.flatten(1))))))


@pytest.fixture(autouse=True)
def pieces(monkeypatch):
    """The models by name, for this file only; compiled functions are shared by all, so each test starts
    anew."""
    torch._dynamo.reset()
    profile_of.cache_clear()
    for name, kind in (("compiled_mlp", mlp), ("compiled_net", Net), ("compiled_tied", Tied)):
        monkeypatch.setitem(zoo.ZOO, name, (lambda kind=kind: kind(AOT), lambda: zoo.images(8)))
    monkeypatch.setitem(zoo.ZOO, "inductor_mlp", (lambda: mlp("inductor"), lambda: zoo.images(8)))
    yield
    torch._dynamo.reset()


CASES = [
    Case(model="compiled_mlp", cuts=2),
    Case(model="compiled_tied", cuts="every"),
    Case(model="compiled_mlp", cuts="every", schedule="gpipe", tier="packed", optimizer="adam"),
    Case(model="compiled_net", cuts=["layer1", "layer2"], tier="packed", steps=2, micro_batches=4),
    Case(model="compiled_mlp", cuts=3, autocast=torch.float16, scaler=(2.0**16, 1), steps=4),
]


SLOW = parameters(CASES[1:], slow=True)
INDUCTOR = pytest.mark.skipif(shutil.which("g++") is None, reason="the default backend needs a C++ compiler")
DEFAULT = Case(model="inductor_mlp", cuts=2, micro_batches=2)
SLOW.append(pytest.param(DEFAULT, marks=[pytest.mark.slow, INDUCTOR]))


@pytest.mark.parametrize("case", [CASES[0], *SLOW], ids=str)
def test_training_has_the_bits_of_the_plain_loop_over_the_same_pieces(case):
    assert differences(case) == []


class Recurrent(nn.Module):
    """A compiled piece that runs an LSTM eagerly, between layers that are not compiled."""

    def __init__(self, backend):
        super().__init__()
        self.start, self.lstm, self.end = nn.Linear(192, 8), nn.LSTM(8, 8), nn.Linear(8, 10)
        self.piece = torch.compile(self.lstm, backend=backend)

    def forward(self, x):
        return self.end(self.piece(self.start(x.flatten(1)).unsqueeze(0))[0].squeeze(0))


@pytest.mark.parametrize("tier", ["device", "packed"])
def test_a_compiled_piece_with_an_lstm_has_the_bits_of_the_plain_loop(tier, monkeypatch):
    monkeypatch.setitem(zoo.ZOO, "compiled_lstm", (lambda: Recurrent(AOT), lambda: zoo.images(8)))
    assert differences(Case(model="compiled_lstm", cuts=2, tier=tier)) == []


def test_what_a_compiled_lstm_saves_is_offloaded():
    lstm, x = compiled(nn.LSTM(64, 64), AOT), torch.randn(5, 64, 64)
    gradients, packed = [], penstock.offload(min_bytes=1)
    for saved in (contextlib.nullcontext(), packed):
        lstm.zero_grad()
        with saved:
            out = lstm(x)[0]
        out.sum().backward()
        gradients.append([p.grad for p in lstm.parameters()])
    assert all(map(torch.equal, *gradients))
    assert packed.bytes_raw > 0


def test_a_compiled_module_is_one_layer_under_its_own_names():
    model, batches = zoo.build("compiled_net")
    graph = penstock.trace(model, (batches[0][0][:4].clone(),))
    assert {"layer1", "layer2", "layer3", "head"} & {*graph.layers} == {"layer1", "layer2", "head"}
    assert graph.layers[-2:] == ("mean", "head")
    assert "layer1._orig_mod.0.conv1.weight" in model.state_dict()
    assert model.layer2._compiled_call_impl is not None


def test_what_runs_in_the_pipeline_is_the_compiled_piece():
    ran = []

    def backend(graph, _):
        def run(*inputs):
            ran.append({x.device.type for x in inputs if isinstance(x, torch.Tensor)})
            return graph.forward(*inputs)

        return run

    model, batches = mlp(backend), zoo.images(8)
    example = (batches[0][0][:4].clone(),)
    pipe = pipeline_of(model, example=example)
    before = len(ran)
    pipe.step(*batches[0])  # 4, 4 and 3 samples: another size is told on the meta device, as it is written
    assert ran[before:] == [{"cpu"}] * 3
    assert {"meta"} not in ran
    assert list(pipe.state_dict()["model"]) == list(model.state_dict())


def test_threads_that_run_as_written_leave_compiled_what_was():
    entered, goes_on = threading.Event(), threading.Event()

    def first():
        with as_written():
            entered.set()
            goes_on.wait(1)  # the other one has begun by then, and would end later

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        run = pool.submit(first)
        entered.wait()
        goes_on.set()
        with as_written():
            concurrent.futures.wait([run], 2)
    calls = []
    compiled(nn.ReLU(), lambda graph, _: calls.append(graph) or graph.forward)(torch.ones(2))
    assert len(calls) == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_that_is_compiled_as_a_whole_is_refused(in_place):
    model = mlp(AOT)
    if in_place:
        model.compile(backend=AOT)
    else:
        model = compiled(model, AOT)
    with pytest.raises(penstock.PlanError, match="compile its parts instead"):
        penstock.trace(model, (torch.randn(4, 3, 8, 8),))
