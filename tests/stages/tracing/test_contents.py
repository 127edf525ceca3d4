"""What a forward leaves in its modules, and what a person changes between steps: refused by its path."""

import collections
import copy
import dataclasses
import enum
import itertools
import random
import types
from typing import Any

import numpy
import pytest
import torch
from cases import OPTIMIZERS
from reference import plain_loop, same_bits
from torch import nn
from torch.nn import functional as F

import penstock
from penstock.stages.tracing.contents import change, contents


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


def nested(self, y):
    self.kept["blocks"][1].append(1)


def remade(self, y):
    self.kept = [*self.kept, 1]


def set_of(self, y):
    self.kept.add(len(self.kept))


def in_object(self, y):
    self.kept.mean = y.mean()


def in_slot(self, y):
    self.kept.last += 1


def in_array(self, y):
    self.kept[0] += 1


def counted(self, y):
    next(self.kept)


def drawn(self, y):
    self.kept.random()


def of_class(self, y):
    type(self).count += 1


def of_list_of_class(self, y):
    self.losses.append(y.mean())


def of_default(self, y, kept=[]):  # noqa: B006
    kept.append(y.mean())


def left(self, y):
    self.kept = y.square().mean()


def new(self, y):
    self.aux_loss = y.square().mean()


def through_data(self, y):
    self.kept[0].data.mul_(0.5)


def counted_in_training(self, y):
    if self.training:
        self.calls = getattr(self, "calls", 0) + 1


def written(self, y):
    self.kept.mul_(0.9).add_(y.detach().mean(0))


def on_a_layer(self, y):
    self.b.seen = y


def of_a_bound_method(self, y):
    self.kept(None, None, y)


def swapped_buffer(self, y):
    self.calls = self.calls + 1


CHANGES = [
    (appended, list, r"kept \(a list of 0, then a list of 1\)"),
    (appended, collections.deque, r"kept \(a deque of 0, then a deque of 1\)"),
    (stored, dict, r"kept \(a dict of 0, then a dict of 1\)"),
    (stored, lambda: {"mean": None}, r"kept\['mean'\] \(None, then a Tensor\)"),
    (stored, collections.OrderedDict, r"kept \(a OrderedDict of 0"),
    (nested, lambda: {"blocks": ((), [])}, r"kept\['blocks'\]\[1\] \(a list of 0, then a list of 1\)"),
    (remade, list, r"kept \(a list of 0, then a list of 1\)"),
    (set_of, set, r"kept \(a set of 0, then a set of 1\)"),
    (in_object, Statistics, r"kept\.mean \(None, then a Tensor\)"),
    (in_object, lambda: [types.SimpleNamespace()][0], r"kept\.mean \(nothing, then a Tensor\)"),
    (in_slot, Slots, r"kept\.last \(0, then 1\)"),
    (in_array, lambda: numpy.zeros(2), r"kept \(a ndarray, then another\)"),
    (counted, itertools.count, r"kept \(a count, then another\)"),
    (drawn, lambda: random.Random(1), r"kept \(a Random, then another\)"),
    (of_class, int, r"Net\.count \(0, then 1\)"),
    (of_list_of_class, int, r"Net\.losses \(a list of 0, then a list of 1\)"),
    (of_default, int, r"__defaults__"),
    (left, int, r"kept \(0, then a Tensor\)"),
    (left, lambda: torch.zeros(()), r"kept \(a Tensor, then another\)"),
    (new, int, r"aux_loss \(nothing, then a Tensor\)"),
    (through_data, lambda: [torch.ones(3)], r"kept\[0\] \(a Tensor, then another\)"),
    (counted_in_training, int, r"calls \(nothing, then 1\)"),
    (written, lambda: torch.zeros(8), r"kept \(a Tensor, then another\)"),
    (written, lambda: nn.Parameter(torch.zeros(8), requires_grad=False), r"kept \(a Parameter, then"),
    (on_a_layer, int, r"b\.seen \(nothing, then a Tensor\)"),
    (of_a_bound_method, lambda: Seen().keep, r"kept\.__self__\.outputs \(a list of 0"),
]


@pytest.mark.parametrize(("work", "make", "told"), CHANGES, ids=lambda item: getattr(item, "__name__", ""))
def test_what_a_forward_leaves_in_its_modules_is_refused_by_its_path(work, make, told):
    with pytest.raises(penstock.PlanError, match=rf"found that it changes .*{told}"):
        penstock.trace(model_of(make(), work), (torch.randn(4, 6),))


def test_a_buffer_that_is_replaced_is_written_to():
    model = model_of(None, swapped_buffer)
    calls = torch.zeros(1)
    model.register_buffer("calls", calls)
    graph = penstock.trace(model, (torch.randn(4, 6),))
    assert graph.layers[-1] == "copy_"
    assert not calls.any()


def cached(self, y):
    if self.kept is None:
        self.kept = torch.arange(8.0)


def test_a_cache_that_a_first_run_fills_is_taken_before_and_after_it():
    model, example = model_of(None, cached), (torch.randn(4, 6),)
    penstock.trace(model, example)
    assert model.kept is None
    with torch.no_grad():
        model(*example)
    penstock.trace(model, example)


class Keeping(nn.Module):
    """Keeps what its first run made of its input or its weight, and scales with it ever after."""

    def __init__(self, make):
        super().__init__()
        self.a, self.b, self.make, self.kept = nn.Linear(6, 8), nn.Linear(8, 3), make, None

    def forward(self, x):
        y = self.a(x)
        if self.kept is None:
            self.kept = self.make(self, y).detach().mean()
        return self.b(y * self.kept)


@pytest.mark.parametrize("make", [lambda net, y: y, lambda net, y: net.a.weight], ids=["batch", "weight"])
def test_a_cache_of_the_first_batch_or_of_weights_is_refused(make):
    with pytest.raises(penstock.PlanError, match=r"kept .*call the model once, under torch\.no_grad"):
        penstock.trace(Keeping(make), (torch.randn(4, 6),))


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


def test_a_class_that_leads_to_itself_ends():
    model = model_of(None, Base.work)
    type(model).losses.append(model)
    type(model).losses.append(type(model))
    penstock.trace(model, (torch.randn(4, 6),))


def test_an_lstm_and_a_tensor_in_a_list_are_no_change():
    class Net(Base):
        def __init__(self):
            super().__init__()
            self.lstm, self.kept = nn.LSTM(8, 8), [torch.ones(8)]

        def forward(self, x):
            return self.b(self.lstm(self.a(x))[0] + self.kept[0])

    penstock.trace(Net(), (torch.randn(4, 6),))


def test_facts_tell_values_apart_by_their_bits():
    for one, other in [(0.0, -0.0), (1, True), (1, 1.0), ((1,), [1]), ({1: 2}, {2: 1}), ("a", b"a")]:
        assert contents(one) != contents(other)
        assert contents(copy.deepcopy(one)) == contents(one)
    assert change((int, 1), (int, 2)) == "1, then 2"
    deep: list = []
    for _ in range(20_000):  # deeper than Python's stack
        deep = [deep]
    assert len(contents(deep)) == 20_001


class Scaled(nn.Module):
    factor = 2.0

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.0)
        self.scale, self.powers, self.table = 0.5, [1.0, 2.0], {"shift": torch.ones(8)}
        self.pad = float("nan")

    def forward(self, x):
        y = self.linear(x) * self.scale * self.powers[1] + self.table["shift"]
        return torch.tanh(y) * self.factor


def scaled():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), type("Mine", (Scaled,), {"factor": 2.0})(), nn.Linear(8, 3))


def pipeline(model):
    example = (torch.randn(3, 6),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    plan = penstock.partition(profile, cuts=["0", "1"], micro_batches=3)
    return penstock.Pipeline(model, plan, loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"])


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(9, 6, generator=generator), torch.randint(3, (9,), generator=generator)


MEANWHILE = [
    (lambda block: setattr(block, "scale", 0.25), r"1\.scale was 0\.5 when .* is 0\.25 now"),
    (lambda block: setattr(block, "scale", True), r"1\.scale"),
    (lambda block: delattr(block, "scale"), r"1\.scale was 0\.5 when .* is absent now"),
    (lambda block: block.powers.__setitem__(1, 3.0), r"1\.powers\[1\] has changed since \(2\.0, then 3\.0\)"),
    (lambda block: block.table["shift"].mul_(2), r"1\.table\['shift'\]"),
    (lambda block: setattr(type(block), "factor", 3.0), r"Mine\.factor"),
    (
        lambda block: setattr(block, "linear", nn.Linear(8, 8)),
        r"the trace went through 1, and its .* children",
    ),
    (lambda block: setattr(block.linear, "weight", nn.Parameter(torch.ones(8, 8))), r"1\.linear\.weight"),
    (
        lambda block: block.register_forward_hook(lambda *_: None),
        r"the trace went through 1, and its .* hooks",
    ),
]


@pytest.mark.parametrize(("meanwhile", "told"), MEANWHILE)
def test_what_a_person_changes_after_the_trace_is_refused(meanwhile, told):
    model = scaled()
    pipe = pipeline(model)
    pipe.step(*batch())
    meanwhile(model[1])
    with pytest.raises(penstock.PlanError, match=told):
        pipe.step(*batch())
    with pytest.raises(penstock.PlanError, match=told):
        pipe.evaluate(batch()[0])


def test_what_is_set_back_or_never_traced_goes_on_with_the_same_bits():
    model = scaled()
    plain, pipe = copy.deepcopy(model), pipeline(model)
    loop = plain_loop(
        plain, [batch()] * 4, loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"], micro_batches=3
    )
    block: Any = model[1]
    for step, expected in enumerate(loop):
        block.scale = float(str(0.5))  # another object of the same value
        block.powers = [1.0, 2.0]
        block.extra = [step]  # nobody reads it
        block.train(step % 2 == 0)
        block.train()
        assert pipe.step(*batch()).loss == expected["loss"]
        assert all(same_bits(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_model_that_nobody_holds_any_more_is_let_go():
    import gc
    import weakref

    from penstock.stages.tracing.watch import Watch

    model = scaled()
    block: Any = model[1]
    watch, gone = Watch(model, ["0", "2"], read=lambda *_: True), weakref.ref(block.linear.weight)
    del model, block
    gc.collect()
    assert gone() is None
    watch.check()


class Keeps(nn.Module):
    """Holds ``powers``, which it may read or not."""

    def __init__(self, powers, *, reads):
        super().__init__()
        self.powers, self.reads = powers, reads

    def forward(self, x):
        return x * self.powers[0] if self.reads else x + 1


def test_what_two_modules_hold_is_refused_where_only_the_second_reads_it():
    powers = [2.0]
    parts = nn.Linear(6, 8), Keeps(powers, reads=False), Keeps(powers, reads=True), nn.Linear(8, 3)
    model, example = nn.Sequential(*parts), (torch.randn(3, 6),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    plan = penstock.partition(profile, cuts=["_0"], micro_batches=3)
    pipe = penstock.Pipeline(model, plan, loss=F.cross_entropy, optimizer=OPTIMIZERS["sgd"])
    pipe.step(*batch())
    powers[0] = 3.0
    with pytest.raises(penstock.PlanError, match=r"2\.powers\[0\] has changed since \(2\.0, then 3\.0\)"):
        pipe.step(*batch())
