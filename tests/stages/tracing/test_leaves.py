"""What is one layer: by request, by itself where the data choose; and how a graph says so."""

import copy
import sys

import pytest
import torch
from reference import same_bits
from torch import nn

import penstock
from penstock import PlanError
from penstock.conf.schema import PlanConfig
from penstock.pipeline.run.build import samples
from penstock.pipeline.run.decide import look


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


class Experts(nn.Module):
    """Rows choose by their values which weights they meet."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        out = torch.zeros_like(x)
        for number, expert in enumerate((self.one, self.two)):
            chosen = ((x.sum(1) > 0) == bool(number)).nonzero().flatten()
            out = out.index_add(0, chosen, expert(x[chosen]))
        return out


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.moe, self.head = Experts(), nn.Linear(6, 3)

    def forward(self, x):
        for block in self.blocks:
            x, _, more = block(x, bias=x)
            x = scaled(x) + more["bias"]
        return self.head(self.moe(x))


X = (torch.randn(4, 6, generator=torch.Generator().manual_seed(1)),)


def layers(leaves=()):
    return penstock.trace(Net(), X, leaves=leaves).layers


@pytest.mark.parametrize(
    "leaf", [Block, "Block", f"{Block.__module__}.Block"], ids=["class", "name", "dotted"]
)
def test_a_class_is_one_layer_wherever_it_stands(leaf):
    found = layers([leaf])
    assert [name for name in found if name.startswith("blocks")] == ["blocks_0", "blocks_1"]


def test_a_path_is_one_layer_and_others_of_its_class_are_not():
    found = [name for name in layers(["blocks.1"]) if name.startswith("blocks")]
    assert found == ["blocks_0_a", "blocks_0_drop", "blocks_0_b", "blocks_1"]


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


class Fading(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(faded(self.first(x)))


def test_a_function_that_is_one_layer_runs_again_each_time(monkeypatch):
    model, plain = Fading(), Fading()
    plain.load_state_dict(model.state_dict())
    graph = penstock.trace(model, X, leaves=[faded])
    plan = penstock.partition(penstock.measure(graph, X, repeats=1), stages=2, micro_batches=1)
    pipe = penstock.Pipeline(model, plan, loss=nn.MSELoss(), optimizer=torch.optim.SGD)
    update = torch.optim.SGD(plain.parameters())
    for factor in (0.5, 2.0):
        monkeypatch.setitem(FACTORS, "now", factor)
        pipe.step(X, torch.ones(4, 3))
        update.zero_grad()
        nn.MSELoss()(plain(*X), torch.ones(4, 3)).backward()
        update.step()
    assert all(map(same_bits, model.parameters(), plain.parameters()))


def test_what_chooses_by_value_is_one_layer_by_itself_and_the_graph_says_why():
    graph = penstock.trace(Net(), X)
    assert "moe" in graph.layers
    shown = str(graph)
    assert shown.startswith("Net: ")
    assert "  one layer   moe (" in shown
    assert "called with x 4x6 float32" in shown
    assert f"of {len(graph.layers) - 1} layers" in shown
    assert "by request" in str(penstock.trace(Net(), X, leaves=[Block]))


@pytest.mark.parametrize(
    "leaves", [[], [Block], [Block, scaled]], ids=["none", "blocks", "blocks and a function"]
)
def test_training_over_leaves_has_the_bits_of_the_plain_loop(leaves):
    torch.manual_seed(0)
    model = Net()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    plain = copy.deepcopy(model)
    profile = penstock.measure(penstock.trace(model, X, leaves=leaves), X, repeats=1)
    plan = penstock.partition(profile, stages=3, micro_batches=2)
    assert set(plan.leaves) >= {"moe"}
    pipe = penstock.Pipeline(
        model, plan, loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        x, y = torch.randn(7, 6), torch.randint(3, (7,))
        pipe.step(x, y)
        optimizer.zero_grad()
        for part in torch.arange(7).tensor_split(2):
            (nn.functional.cross_entropy(plain(x[part].clone()), y[part]) * (len(part) / 7)).backward()
        optimizer.step()
        pairs = zip(plain.parameters(), pipe.state_dict()["model"].values(), strict=True)
        assert all(same_bits(a, b) for a, b in pairs), step


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
    data = {"_target_": "penstock.pipeline.samples.fake.load"}
    model = {"_target_": "penstock.pipeline.models.mlp", "hidden": [8], "leaves": ["Sequential.1"]}
    config = PlanConfig(model=model, data=data, batch_size=16, micro_batches=2, threads=1)
    with pytest.raises(PlanError, match=r"found 'Sequential\.1'"):
        look(config, samples(config.data, batch_size=16))
    config.model["leaves"] = ["ReLU"]
    profile = look(config, samples(config.data, batch_size=16))
    assert any(leaf in {layer.module for layer in profile.layers} for leaf in profile.leaves)


def shifted(x, shifts):
    """A function that changes the list that it was given."""
    shifts[0] = -shifts[0]
    return torch.roll(x, shifts, dims=(0, 1))


class Shifting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(shifted(x, [1, 2]))


def test_a_function_may_change_the_list_that_it_is_given():
    graph = penstock.trace(Shifting(), X, leaves=[shifted])
    assert list(graph.layers) == ["shifted", "linear"]
    assert penstock.measure(graph, X, repeats=2).layers


class Doubles:
    def __call__(self, gradient):
        return gradient * 2


class Hooked(nn.Module):
    """Hands torch what calls a module, in a backward."""

    def __init__(self, hook):
        super().__init__()
        self.weight, self.hook = nn.Parameter(torch.ones(8)), hook

    def twice(self, gradient):
        return gradient * 2

    def forward(self, x):
        y = x * self.weight
        if y.requires_grad:
            y.register_hook(self.hook or self.twice)
        return y + 1


HOOKS = {"a lambda": lambda g: g * 2, "an object": Doubles(), "a module": nn.ReLU(), "a method": None}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=[*HOOKS])
def test_a_module_that_hands_torch_what_it_calls_later_is_one_layer(hook):
    model = nn.Sequential(nn.Linear(8, 8), Hooked(hook), nn.Linear(8, 8))
    graph = penstock.trace(model, (torch.randn(2, 8),))
    assert [layer.name for layer in graph.train.layers] == ["_0", "_1", "_2"]
