"""Models on the meta device: recorded by shapes as a real run would be, refused where a run needs values."""

import copy
import dataclasses

import numpy
import pytest
import torch
from cases import LARGE
from torch import nn
from torch.nn import functional as F
from zoo import ZOO, build

import penstock

SCALE = torch.tensor(2.0)
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.between(self.a(x)))

    def between(self, x):
        return x


def bare(make):
    with torch.device("meta"):
        return make()


def record(graph):
    """All that a pipeline takes from a trace but strides, which the meta device does not promise."""
    return [
        (
            graph.layers,
            [dataclasses.replace(value, strides=None) for value in probe.values],
            (probe.random, probe.seeded, probe.refused, probe.samples),
            (traced.leaves, traced.sizes, traced.fixed),
            [(layer.name, layer.module, layer.holds, layer.moves) for layer in traced.layers],
        )
        for traced, probe in ((graph.train, graph.train_probe), (graph.eval, graph.eval_probe))
    ] + [graph.shared, graph.fingerprint]


LEFT = [name for name in ZOO if name in LARGE or name.startswith(("gpt", "dag"))]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in LEFT else ()) for n in ZOO if n != "padded"]
)
def test_a_model_without_values_has_the_record_of_one_with_values(name):
    model, batches = build(name)
    example = (batches[0][0][:4].clone(),)
    without = copy.deepcopy(model).to("meta")
    if name == "gpt_tied":  # .to() parts what is tied
        without.head.weight = without.token.weight
    found = penstock.trace(without, example)
    assert record(found) == record(penstock.trace(model, example))
    assert all(
        tensor.is_meta for tensor in (*without.parameters(), *without.buffers(), *found.example_inputs)
    )


def test_a_recurrent_network_and_one_of_lists_of_blocks_are_recorded():
    model = bare(lambda: nn.Sequential(nn.LSTM(4, 4, num_layers=2, dropout=0.2)))
    graph = penstock.trace(model, (torch.randn(3, 5, 4),))
    assert graph.train_probe.random == {"_0"}
    encoder = bare(lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2))
    assert penstock.trace(encoder, (torch.randn(3, 5, 8),)).layers == ("layers_0", "layers_1")


def test_what_forward_makes_of_no_tensor_has_no_values_either_but_for_arrays():
    adds = two(
        lambda self, x: x * torch.arange(4) + torch.tensor([1.0, 2.0, 3.0, 4.0]) * SCALE + torch.rand(4),
        "Adds",
    )
    graph = penstock.trace(bare(adds), (X.to("meta"),))
    assert graph.train.constants == {"_constant_0": SCALE}
    assert graph.train_probe.random == {"rand"}
    assert {graph.train_probe.values[i].dtype for i in (2, 3)} == {torch.float32, torch.int64}
    of_numpy = two(lambda self, x: x * torch.from_numpy(numpy.ones(4, dtype="float32")), "OfNumpy")
    graph = penstock.trace(bare(of_numpy), (X.to("meta"),))
    assert [tensor.tolist() for tensor in graph.train.constants.values()] == [[1.0] * 4]


def test_a_model_of_which_only_a_part_has_values_is_recorded_and_keeps_them():
    model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.BatchNorm1d(4), nn.Linear(4, 2, device="meta"))
    statistics = dict(model.named_buffers())["1.running_mean"]
    kept = statistics.clone()
    assert penstock.trace(model, (X,)).layers == ("_0", "_1", "_2")
    assert model[1].running_mean is statistics
    assert torch.equal(statistics, kept)
    assert [p.is_meta for p in model.parameters()] == [True, True, False, False, True, True]


def two(between, name):
    return lambda: type(name, (Two,), {"between": between})()


by_truth = two(lambda self, x: x * 2 if x.sum() > 0 else x, "ByTruth")
RETURNS = {"forward": lambda self, x: Two.forward(self, x).sum().item()}
NEED_VALUES = {
    "ByTruth": by_truth,
    "ByTruth inside": lambda: nn.Sequential(nn.Linear(4, 4), by_truth()),
    "ByWeight": two(lambda self, x: x * float(self.a.weight.norm()), "ByWeight"),
    "BySelection": two(lambda self, x: x[x > 0].sum() + x, "BySelection"),
    "ByChance": two(lambda self, x: x * 2 if torch.rand(()) < 0.5 else x, "ByChance"),
    "Returns": lambda: type("Returns", (Two,), RETURNS)(),
}


@pytest.mark.parametrize("name", NEED_VALUES)
def test_a_forward_that_needs_values_is_refused_with_its_place_and_the_remedy(name):
    with pytest.raises(penstock.PlanError) as refused:
        penstock.trace(bare(NEED_VALUES[name]), (X,))
    told = str(refused.value)
    assert f"recorded by shapes, and forward of {name.split()[0]} ({__file__}:" in told
    assert "load the model whole before it is traced" in told
    assert "\n" not in told


def test_a_forward_that_fails_anyway_is_not_said_to_need_values():
    wrong = two(lambda self, x: x @ torch.zeros(7, 2), "Wrong")
    with pytest.raises(
        penstock.PlanError, match=r"does not run on inputs of shape \(3, 4\): .*; give it an example"
    ):
        penstock.trace(bare(wrong), (X,))


def fills(self, x):
    if not hasattr(self, "table"):
        self.table = torch.arange(4.0)
    return x * self.table


SPOIL = [
    (lambda model: setattr(model, "scale", torch.ones(4)), "found scale, which is neither; register it"),
    (lambda model: setattr(model, "all", [model.a.weight]), r"found all\[0\], .* read it as a\.weight"),
    (lambda model: setattr(model.b.weight, "data", model.a.weight.data), r"lie in one memory .*= a\.weight"),
    (lambda model: setattr(type(model), "between", fills), r"changes table \(nothing, then a Tensor\)"),
]


@pytest.mark.parametrize(("spoil", "told"), SPOIL)
def test_tensors_that_nobody_could_give_values_are_refused_by_path(spoil, told):
    model = bare(two(lambda self, x: x, "Spoilt"))
    with torch.device("meta"):
        spoil(model)
    with pytest.raises(penstock.PlanError, match=told):
        penstock.trace(model, (X,))


def test_autocast_is_refused_where_torch_has_none():
    with pytest.raises(penstock.PlanError, match=r"without autocast, .* found autocast=torch\.bfloat16"):
        penstock.trace(bare(Two), (X,), autocast=torch.bfloat16)


def test_statistics_that_a_norm_writes_to_are_not_on_both_sides_of_a_cut():
    def norm(self, x):
        return F.batch_norm(x, self.get_buffer("mean"), self.get_buffer("var"), training=True)

    def make():
        own = {"norm": norm, "forward": lambda self, x: self.norm(self.b(self.norm(self.a(x))))}
        model = type("Normed", (Two,), own)()
        model.register_buffer("mean", torch.zeros(4))
        model.register_buffer("var", torch.ones(4))
        return model

    refused = penstock.trace(bare(make), (X,)).train_probe.refused
    assert list(refused) == [1, 2]
    assert all("use the buffer mean, and write to it" in reason for reason in refused.values())
    assert refused == penstock.trace(make(), (X,)).train_probe.refused
