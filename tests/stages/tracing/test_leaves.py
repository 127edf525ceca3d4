"""Single layers: by request, by themselves where the data choose; and how a graph shows it."""

import sys

import pytest
import torch
from small_pipelines import batch, differences, model_of
from torch import nn

import penstock
from penstock import PlanError
from penstock.conf.schema import PlanConfig
from penstock.pipeline.run.build import samples
from penstock.pipeline.run.planning import record


def scaled(x):
    """A function that would be three layers."""
    return (x * 2 + 1).tanh()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.5)

    def forward(self, x, *, bias=None):
        y = self.drop(torch.relu(self.a(x)))
        return x + self.b(y), None, {"bias": y if bias is None else y + bias}


def experts(self, x):
    """Rows choose by their values which weights they meet."""
    out = torch.zeros_like(x)
    for number, expert in enumerate((self.one, self.two)):
        chosen = ((x.sum(1) > 0) == bool(number)).nonzero().flatten()
        out = out.index_add(0, chosen, expert(x[chosen]))
    return out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.moe = model_of(experts, one=nn.Linear(6, 6), two=nn.Linear(6, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x, _, more = block(x, bias=x)
            x = scaled(x) + more["bias"]
        return self.head(self.moe(x))


X = (torch.randn(4, 6, generator=torch.Generator().manual_seed(1)),)


def layers(leaves=()):
    return penstock.trace(Net(), X, leaves=leaves).layers


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (Block, ["blocks_0", "blocks_1"]),
        ("Block", ["blocks_0", "blocks_1"]),
        (f"{Block.__module__}.Block", ["blocks_0", "blocks_1"]),
        ("blocks.1", ["blocks_0_a", "blocks_0_drop", "blocks_0_b", "blocks_1"]),
    ],
)
def test_a_class_is_one_layer_wherever_it_stands_and_a_path_there(leaf, expected):
    assert [name for name in layers([leaf]) if name.startswith("blocks")] == expected


@pytest.mark.parametrize("leaf", [scaled, f"{__name__}.scaled"], ids=["itself", "its name"])
def test_a_function_is_one_layer(leaf):
    graph = penstock.trace(Net(), X, leaves=[leaf])
    assert [name for name in graph.layers if name.startswith("scaled")] == ["scaled", "scaled_1"]
    assert not [name for name in graph.layers if name.startswith("tanh")]
    assert sys.modules[__name__].scaled is scaled  # put back


FACTORS = {"now": 0.0}


def faded(x):
    """Another factor at every step, which no recording can see."""
    return x * FACTORS["now"]


def fading():
    return model_of(
        lambda self, x: self.last(faded(self.first(x))), first=nn.Linear(6, 6), last=nn.Linear(6, 3)
    )


def test_a_function_that_is_one_layer_runs_again_each_time(monkeypatch):
    changes = [lambda model, f=factor: monkeypatch.setitem(FACTORS, "now", f) for factor in (0.5, 2.0)]
    assert differences(fading, changes, leaves=[faded]) == []


def test_other_data_of_the_same_counts_by_chance_hide_no_choice_by_value():
    for seed in range(12):
        torch.manual_seed(seed)
        assert "moe" in layers(), seed


@pytest.mark.parametrize(
    "leaves", [(), ["hot"]], ids=["a function", "a layer"]
)  # the layer shows shapes alone
def test_a_result_that_is_as_long_as_a_value_says_is_refused(leaves):
    hot = model_of(lambda self, x: nn.functional.one_hot(x))  # as many columns as the largest element says
    model = model_of(
        lambda self, x: self.last(self.hot(x).float().sum(-1, True)), hot=hot, last=nn.Linear(1, 2)
    )
    with pytest.raises(PlanError, match="the shape of hot depends on the data in module hot"):
        penstock.trace(model, (torch.tensor([0, 0, 1, 0]),), leaves=leaves)


def test_what_chooses_by_value_is_one_layer_by_itself_and_the_graph_says_why():
    graph = penstock.trace(Net(), X)
    assert "moe" in graph.layers
    shown = str(graph)
    assert shown.startswith("Net: ")
    assert "  one layer   moe (" in shown
    assert "called with x 4x6 float32" in shown
    assert f"of {len(graph.layers) - 1} layers" in shown
    assert "by request" in str(penstock.trace(Net(), X, leaves=[Block]))


def gate(self, x):
    """A weight chooses what is done with it."""
    return x * self.weight if self.weight.sum() > 0 else x + self.weight


def test_what_chooses_by_a_weight_is_one_layer_by_itself():
    def gated():
        weighed = model_of(gate, weight=nn.Parameter(torch.zeros(6)))
        return nn.Sequential(nn.Linear(6, 6), weighed, nn.Linear(6, 3))

    assert penstock.trace(gated(), X).layers == ("_0", "_1", "_2")
    assert differences(gated, data=batch(8), evaluates=False) == []


def without_dropout():
    model = Net()
    for block in model.blocks:
        drop = block.get_submodule("drop")
        assert isinstance(drop, nn.Dropout)
        drop.p = 0.0
    return model


@pytest.mark.parametrize(
    "leaves", [[], [Block], [Block, scaled]], ids=["none", "blocks", "blocks and a function"]
)
def test_training_over_leaves_has_the_bits_of_the_plain_loop(leaves):
    assert differences(without_dropout, data=batch(8), leaves=leaves, evaluates=False) == []


def test_a_random_leaf_is_seeded_by_its_name():
    graph = penstock.trace(Net(), X, leaves=[Block])
    assert graph.train_probe.random == {"blocks_0", "blocks_1"}


@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        (["Blok"], r"found 'Blok'; it has Block"),
        (["blocks.7"], r"found 'blocks.7'; it has .*blocks"),
        ([nn.LSTM], r"found 'LSTM'"),
        ([3], r"found '3'"),
        (["blocks"], r"blocks is a ModuleList, which nobody calls"),
        ([Net], r"the whole model as one leaf is one layer"),
        ("Block", r"leaves is a list"),
    ],
)
def test_a_leaf_that_is_nothing_of_the_model_is_refused(leaves, said):
    with pytest.raises(PlanError, match=said):
        layers(leaves)


def test_a_run_is_told_its_leaves_by_an_option():
    data = {"_target_": "penstock.pipeline.data.fake.load"}
    model = {"_target_": "penstock.pipeline.models.mlp", "hidden": [8], "leaves": ["Sequential.1"]}
    config = PlanConfig(model=model, data=data, batch_size=16, micro_batches=2, threads=1)
    with pytest.raises(PlanError, match=r"found 'Sequential\.1'"):
        record(config, samples(config.data, batch_size=16))
    config.model["leaves"] = ["ReLU"]
    profile = record(config, samples(config.data, batch_size=16)).measure()
    assert any(leaf in {layer.module for layer in profile.layers} for leaf in profile.leaves)


def shifted(x, shifts):
    """A function that changes the list that it was given."""
    shifts[0] = -shifts[0]
    return torch.roll(x, shifts, dims=(0, 1))


def test_a_function_may_change_the_list_that_it_is_given():
    model = model_of(lambda self, x: self.linear(shifted(x, [1, 2])), linear=nn.Linear(6, 6))
    graph = penstock.trace(model, X, leaves=[shifted])
    assert list(graph.layers) == ["shifted", "linear"]
    assert penstock.measure(graph, X, repeats=2).layers


class Doubles:
    def __call__(self, gradient):
        return gradient * 2

    def method(self, gradient):
        return gradient * 2


HOOKS = [lambda gradient: gradient * 2, Doubles(), nn.ReLU(), Doubles().method]


@pytest.mark.parametrize("hook", HOOKS, ids=["a lambda", "an object", "a module", "a method"])
def test_a_module_that_hands_torch_what_it_calls_later_is_one_layer(hook):
    def hooked(self, x):
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(self.hook)
        return y + 1

    part = model_of(hooked, weight=nn.Parameter(torch.ones(8)), hook=hook)
    graph = penstock.trace(nn.Sequential(nn.Linear(8, 8), part, nn.Linear(8, 8)), (torch.randn(2, 8),))
    assert [layer.name for layer in graph.train.layers] == ["_0", "_1", "_2"]
