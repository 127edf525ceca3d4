"""The graph of dependencies as data, against literals; and that of larger networks, against its own rules."""

import json

import pytest
import torch
from profiles import measured
from small_pipelines import model_of
from torch import nn
from zoo import build

from penstock.stages.profiling.dependencies import BACKWARD, FORWARD, KINDS, UPDATE, Compute, dependencies


def small(self, x):
    y = torch.relu_(self.norm(self.a(x)))
    return y + self.b(y)


def graph_of(model, x, **options):
    return dependencies(*measured(model, x), **options)


def data_at(found, layer, way, *, enters):
    """Numbers of the data that a layer reads, or makes, on that way."""
    return tuple(e.data for e in found.edges if (e.layer, e.way, e.enters) == (layer, way, enters))


def test_literals_of_a_small_network():
    torch.manual_seed(0)
    frozen = nn.Linear(4, 4, bias=False).requires_grad_(False)
    net = model_of(small, a=nn.Linear(6, 4), b=frozen, norm=nn.BatchNorm1d(4, affine=False))
    found = graph_of(net, torch.randn(3, 6), optimizer_state=2.0, old_versions=[1, 1, 0, 0, 0])
    assert found.layers == ("a", "norm", "relu_", "b", "add")
    told = [(one.name, one.kind, one.layer, one.num_bytes) for one in found.data]
    assert told == [
        ("x", "value", -1, 72),
        ("a", "value", 0, 48),
        ("norm", "value", 1, 48),
        ("b", "value", 3, 48),
        ("add", "value", 4, 48),
        ("gradient of a", "gradient", 0, 48),
        ("gradient of norm", "gradient", 1, 48),
        ("gradient of b", "gradient", 3, 48),
        ("gradient of add", "gradient", 4, 48),
        ("statistic 1 of norm", "saved", 1, 16),
        ("statistic 2 of norm", "saved", 1, 16),
        ("a.weight", "parameter", 0, 96),
        ("gradient of a.weight", "gradient", 0, 96),
        ("optimizer state of a.weight", "optimizer", 0, 192),
        ("old versions of a.weight", "version", 0, 96),
        ("a.bias", "parameter", 0, 16),
        ("gradient of a.bias", "gradient", 0, 16),
        ("optimizer state of a.bias", "optimizer", 0, 32),
        ("old versions of a.bias", "version", 0, 16),
        ("norm.running_mean", "buffer", 1, 16),
        ("norm.running_var", "buffer", 1, 16),
        ("norm.num_batches_tracked", "buffer", 1, 8),
        ("b.weight", "parameter", 3, 64),
    ]
    x, a, norm, b, add, of_a, of_norm, of_b, of_add = range(9)

    def ways(layer):
        return [
            [set(data_at(found, layer, way, enters=enters)) for enters in (True, False)]
            for way in (FORWARD, BACKWARD)
        ]

    weight, bias = 11, 15
    assert ways(0) == [[{x, weight, bias}, {a}], [{x, of_a}, {weight + 1, bias + 1}]]
    assert ways(1) == [[{a, 19, 20, 21}, {norm, 9, 10}], [{a, of_norm, 9, 10, 19, 20}, {of_a}]]
    assert ways(2) == [[{norm}, {norm}], [{norm, of_norm}, {of_norm}]]  # in place
    assert ways(3) == [[{norm, 22}, {b}], [{of_b, 22}, {of_norm}]]  # no gradient of a frozen weight
    assert ways(4) == [[{norm, b}, {add}], [{of_add}, {of_norm, of_b}]]
    assert set(data_at(found, 0, UPDATE, enters=True)) == {weight + 1, weight + 2, bias + 1, bias + 2}
    assert set(data_at(found, 0, UPDATE, enters=False)) == {11, 13, 14, 15, 17, 18}
    pairs = [(0, 1), (1, 2), (2, 3), (2, 4), (3, 4)]
    assert found.compute == (
        *sorted(Compute(BACKWARD, target, source) for source, target in pairs),
        *(Compute(FORWARD, *pair) for pair in pairs),
    )


def test_the_data_are_written(tmp_path):
    torch.manual_seed(0)
    found = graph_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.randn(3, 2))
    found.save(tmp_path / "graph.json")
    data = json.loads((tmp_path / "graph.json").read_text())
    assert data["layers"] == [{"name": "_0", "module": "0"}, {"name": "_1", "module": "1"}]
    assert data["data"][0] == {"name": "input_1", "kind": "value", "layer": -1, "num_bytes": 24}
    assert data["compute_edges"] == [["backward", "L1", "L0"], ["forward", "L0", "L1"]]
    assert data["data_edges"][:4] == [
        ["forward", "D0", "L0"],
        ["forward", "L0", "D1"],
        ["forward", "D1", "L1"],
        ["backward", "D3", "L0"],
    ]


@pytest.mark.parametrize(
    "name", ["gpt_tied", pytest.param("dag1", marks=pytest.mark.slow), "residual", "penalized"]
)
def test_every_edge_goes_with_time_and_every_trained_parameter_is_updated(name):
    model, batches = build(name)
    found = graph_of(model, batches[0][0][:4], optimizer_state=1.0)
    made = {e.data: e.layer for e in reversed(found.edges) if e.way == FORWARD and not e.enters}
    assert {one.kind for one in found.data} <= {*KINDS}
    for edge in found.edges:
        if edge.way == FORWARD and edge.enters and edge.data in made:
            assert made[edge.data] < edge.layer
    for way, source, target in found.compute:
        assert (source < target) == (way == FORWARD)
    updated = [e.data for e in found.edges if e.way == UPDATE and not e.enters]
    trained = [n for n in updated if found.data[n].kind == "parameter"]
    outputs = model(batches[0][0][:4])
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.stack([each.sum() for each in outputs]).sum().backward()
    with_gradient = [p.nbytes for p in model.parameters() if p.grad is not None]
    assert sum(found.data[n].num_bytes for n in trained) == sum(with_gradient)


def gate(self, x):
    y = self.start(x)
    return self.end(torch.where(y > 0, y, 0.0))


def test_what_compares_gives_no_gradient_and_backwards_read_old_versions():
    torch.manual_seed(0)
    model = model_of(gate, start=nn.Linear(2, 2, bias=False), end=nn.Linear(2, 2, bias=False))
    found = graph_of(model, torch.randn(3, 2), old_versions=[2, 0, 0, 1])
    assert found.layers == ("start", "gt", "where", "end")
    names = [one.name for one in found.data]
    wanted = ("gradient of start", "old versions of end.weight", "end.weight")
    gradient, old, weight = (names.index(name) for name in wanted)
    assert [e.layer for e in found.edges if (e.way, e.data, e.enters) == (BACKWARD, gradient, False)] == [2]
    assert data_at(found, 1, BACKWARD, enters=True) == ()
    assert Compute(FORWARD, 0, 1) in found.compute
    assert Compute(BACKWARD, 1, 0) not in found.compute
    assert {old, weight} & {*data_at(found, 3, BACKWARD, enters=True)} == {old}
    assert [(one.layer, one.num_bytes) for one in found.data if one.kind == "version"] == [(0, 32), (3, 16)]
