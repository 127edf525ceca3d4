"""Contents that a forward leaves in its modules are refused by their path."""

import collections
import copy
import dataclasses
import enum
import itertools
import random
import types

import numpy
import pytest
import torch
from torch import nn

import penstock
from penstock.stages.tracing.object_snapshot import change, contents, digest


@dataclasses.dataclass
class Statistics:
    mean: object = None
    history: list = dataclasses.field(default_factory=list)


class Slots:
    __slots__ = ("last",)

    def __init__(self):
        self.last = 0


class Seen:
    """A hook that is the method of an object."""

    def __init__(self):
        self.outputs = []

    def keep(self, module, args, output):
        self.outputs.append(output)


class Base(nn.Module):
    count = 0
    losses: list = []  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.kept = None

    def work(self, y):
        pass

    def forward(self, x):
        y = torch.relu(self.a(x))
        self.work(y)
        return self.b(y)


def model_of(kept, work):
    torch.manual_seed(0)
    model = type("Net", (Base,), {"work": work, "count": 0, "losses": []})()
    model.kept = kept
    return model


def appended(self, y):
    self.kept.append(y.square().mean())


def stored(self, y):
    self.kept["mean"] = y.mean()


def in_object(self, y):
    self.kept.mean = y.mean()


def left(self, y):
    self.kept = y.square().mean()


def counted_in_training(self, y):
    if self.training:
        self.calls = getattr(self, "calls", 0) + 1


CHANGES = [
    (appended, list, r"kept \(a list of 0, then a list of 1\)"),
    (appended, collections.deque, r"kept \(a deque"),
    (stored, dict, r"kept \(a dict"),
    (stored, lambda: {"mean": None}, r"kept\['mean'\] \(None, then a Tensor\)"),
    (stored, collections.OrderedDict, r"kept \(a OrderedDict"),
    (lambda self, y: self.kept["in"][1].append(1), lambda: {"in": ((), [])}, r"kept\['in'\]\[1\]"),
    (lambda self, y: setattr(self, "kept", [*self.kept, 1]), list, r"kept \(a list"),
    (lambda self, y: self.kept.add(len(self.kept)), set, r"kept \(a set"),
    (in_object, Statistics, r"kept\.mean \(None, then a Tensor\)"),
    (in_object, lambda: [types.SimpleNamespace()][0], r"kept\.mean \(nothing, then a Tensor\)"),
    (lambda self, y: setattr(self.kept, "last", self.kept.last + 1), Slots, r"kept\.last \(0, then 1\)"),
    (lambda self, y: self.kept.__iadd__(1), lambda: numpy.zeros(2), r"kept \(a ndarray, then another\)"),
    (lambda self, y: next(self.kept), itertools.count, r"kept \(a count"),
    (lambda self, y: self.kept.random(), lambda: random.Random(1), r"kept \(a Random"),
    (lambda self, y: setattr(type(self), "count", self.count + 1), int, r"Net\.count"),
    (lambda self, y: self.losses.append(y.mean()), int, r"Net\.losses"),
    (lambda self, y, kept=[]: kept.append(y.mean()), int, r"__defaults__"),
    (left, int, r"kept \(0, then a Tensor\)"),
    (left, lambda: torch.zeros(()), r"kept \(a Tensor, then another\)"),
    (lambda self, y: setattr(self, "aux_loss", y.square().mean()), int, r"aux_loss"),
    (lambda self, y: self.kept[0].data.mul_(0.5), lambda: [torch.ones(3)], r"kept\[0\]"),
    (counted_in_training, int, r"calls"),
    (lambda self, y: self.kept.mul_(0.9).add_(y.data.mean(0)), lambda: torch.zeros(8), r"kept \(a Tensor"),
    (lambda self, y: setattr(self.b, "seen", y), int, r"b\.seen"),
    (lambda self, y: self.kept(None, None, y), lambda: Seen().keep, r"kept\.__self__\.outputs"),
]


@pytest.mark.parametrize(("work", "make", "told"), CHANGES, ids=lambda item: getattr(item, "__name__", ""))
def test_what_a_forward_leaves_in_its_modules_is_refused_by_its_path(work, make, told):
    with pytest.raises(penstock.PlanError, match=rf"found that it changes .*{told}"):
        penstock.trace(model_of(make(), work), (torch.randn(4, 6),))


def test_a_buffer_that_is_replaced_is_written_to():
    def swapped(self, y):
        self.calls = self.calls + 1

    model = model_of(None, swapped)
    calls = torch.zeros(1)
    model.register_buffer("calls", calls)
    graph = penstock.trace(model, (torch.randn(4, 6),))
    assert graph.layers[-1] == "copy_"
    assert not calls.any()


def test_a_buffer_that_is_replaced_by_another_shape_is_refused_without_a_place():
    def grown(self, y):
        self.calls = torch.ones(2)

    model = model_of(None, grown)
    model.register_buffer("calls", torch.zeros(1))
    with pytest.raises(penstock.PlanError, match=r"calls is replaced by .* before it is traced\); put that"):
        penstock.trace(model, (torch.randn(4, 6),))


def test_a_cache_that_a_first_run_fills_is_taken_before_and_after_it():
    def cached(self, y):
        if self.kept is None:
            self.kept = torch.arange(8.0)

    model, example = model_of(None, cached), (torch.randn(4, 6),)
    penstock.trace(model, example)
    assert model.kept is None
    with torch.no_grad():
        model(*example)
    penstock.trace(model, example)


@pytest.mark.parametrize("make", [lambda net, y: y, lambda net, y: net.a.weight], ids=["batch", "weight"])
def test_a_cache_of_the_first_batch_or_of_weights_is_refused(make):
    class Keeping(Base):
        def forward(self, x):
            y = self.a(x)
            if self.kept is None:
                self.kept = make(self, y).detach().mean()
            return self.b(y * self.kept)

    with pytest.raises(penstock.PlanError, match=r"kept .*call the model once, under torch\.no_grad"):
        penstock.trace(Keeping(), (torch.randn(4, 6),))


def cleared(self, y):
    self.kept.append(y)
    self.kept.clear()


class Color(enum.Enum):
    RED = float("nan")


def odd():
    """Values that are not equal to themselves, that contain themselves, or that a copy cannot share."""
    cycle = [float("nan"), numpy.float32("nan"), complex("nan"), Color.RED, torch.float32]
    cycle.append({"again": cycle, (1, "two"): torch.Size([3]), None: frozenset({1})})
    return cycle


@pytest.mark.parametrize(
    ("work", "make"),
    [(cleared, list), (Base.work, lambda: float("nan")), (Base.work, odd), (Base.work, Seen)],
)
def test_what_ends_as_it_began_is_no_change(work, make):
    penstock.trace(model_of(make(), work), (torch.randn(4, 6),))


def through_lstm(self, x):
    return self.b(self.lstm(self.a(x))[0] + self.kept[0])


def test_a_class_that_leads_to_itself_and_an_lstm_beside_a_tensor_in_a_list_are_no_change():
    model = model_of(None, Base.work)
    type(model).losses.extend([model, type(model)])
    recurrent = model_of([torch.ones(8)], Base.work)
    recurrent.lstm = nn.LSTM(8, 8)
    type(recurrent).forward = through_lstm
    for each in (model, recurrent):
        penstock.trace(each, (torch.randn(4, 6),))


def test_facts_tell_values_apart_by_their_bits():
    for one, other in [(0.0, -0.0), (1, True), (1, 1.0), ((1,), [1]), ({1: 2}, {2: 1}), ("a", b"a")]:
        assert contents(one) != contents(other)
        assert contents(copy.deepcopy(one)) == contents(one)
    assert change((int, 1), (int, 2)) == "1, then 2"
    deep: list = []
    for _ in range(20_000):  # deeper than Python's stack
        deep = [deep]
    assert len(contents(deep)) == 20_001


def test_a_digest_is_that_of_all_but_registered_values():
    def made(weight=1.0, buffer=1.0, hidden=1.0, order=("a", "b"), count=3):
        model = model_of([torch.full((2,), hidden)], Base.work)
        vars(model).update(names=set(order), count=count)
        model.register_buffer("first", torch.full((2,), buffer))
        model.register_parameter("start", nn.Parameter(model.b.bias.detach().clone()))
        with torch.no_grad():
            model.a.weight.fill_(weight)
        return model

    same = digest(made())
    assert digest(made(weight=2.0, buffer=2.0, order=("b", "a"))) == same
    tied, strided = made(), made()
    tied.b.register_parameter("bias", dict(tied.named_parameters())["start"])
    strided.a.weight.data = strided.a.weight.data.t().contiguous().t()
    for other in (made(hidden=2.0), made(order=("a", "c")), made(count=4), tied, strided):
        assert digest(other) != same
