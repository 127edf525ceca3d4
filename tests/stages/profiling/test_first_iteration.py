"""Results of a measuring run: intermediate data, on a GPU, and a model without values."""

import copy
import dataclasses
import json
import weakref

import pytest
import torch
from devices import Noting, Reads
from profiles import measured
from small_pipelines import model_of
from torch import nn
from torch.nn import functional as F
from zoo import ZOO, build

import penstock
from penstock import trace
from penstock.compression.codec_cost import candidates
from penstock.compression.errors import PlanError
from penstock.stages.profiling import measure as module
from penstock.stages.profiling.measure import parts_with_random_values
from penstock.stages.profiling.network_profile import KINDS, Profile
from penstock.stages.profiling.saved_tensors import zero_count

X = torch.arange(4 * 3 * 8 * 8).remainder(7).float().reshape(4, 3, 8, 8)


def every_kind(self, x):
    """Every kind of intermediate data, and a value that two layers read."""
    y = F.relu(self.norm(self.conv(x)))
    flat = self.drop(self.pool(y + torch.where(y > 0.5, y, 0.0)).flatten(1))
    return self.end(flat)


def profiled(model, x):
    return measured(model, x)[1]


def test_a_backward_is_timed_as_it_adds_to_gradients_that_are_there():
    graph = trace(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), (torch.randn(4, 8),))
    bias, sums = list(graph.model_copy.parameters())[-1], []
    bias.register_post_accumulate_grad_hook(lambda p: sums.append(p.grad.sum().item()))
    penstock.measure(graph, (torch.randn(4, 8),), repeats=2)
    assert sums == [8.0, 16.0, 24.0, 32.0, 40.0]  # a gradient of ones for each of 4 x 2 outputs, run upon run
    assert all(parameter.grad is None for parameter in graph.model_copy.parameters())


@pytest.fixture(scope="module")
def profile():
    torch.manual_seed(0)
    parts = {"conv": nn.Conv2d(3, 8, 3, padding=1), "norm": nn.BatchNorm2d(8), "pool": nn.MaxPool2d(2)}
    parts |= {"drop": nn.Dropout(0.5), "end": nn.Linear(128, 10)}
    return profiled(model_of(every_kind, **parts), X)


def test_every_storage_with_its_kind_its_maker_and_its_savers(profile):
    names = ["input", *(layer.name for layer in profile.layers)]
    told = [
        (names[i.maker + 1], [names[n + 1] for n in i.savers], i.order, i.value, i.kind, i.num_bytes)
        for i in profile.intermediates
    ]
    assert told == [
        ("input", ["conv"], 0, "x", "feature map", 3072),
        ("conv", ["norm"], 0, "conv", "feature map", 8192),
        ("norm", ["norm"], 1, "", "statistic", 32),
        ("norm", ["norm"], 2, "", "statistic", 32),
        ("relu", ["relu"], 0, "relu", "feature map", 8192),
        ("gt", ["where"], 0, "gt", "mask", 2048),
        ("add", ["pool"], 0, "add", "feature map", 8192),
        ("pool", ["pool"], 1, "", "index", 4096),
        ("drop", ["drop"], 0, "", "mask", 2048),
        ("drop", ["end"], 0, "drop", "feature map", 2048),
    ]
    assert [n for n, i in enumerate(profile.intermediates) if i.savers == (i.maker,)] == [2, 3, 4, 7, 8]
    assert {i.readers for i in profile.intermediates} == {1}
    relu, half = profile.intermediates[4], profile.intermediates[8]
    assert (relu.shape, relu.dtype) == ((4, 8, 8, 8), "float32")
    assert 0.2 < relu.zeros < 0.8
    assert 0.3 < half.zeros < 0.7


def test_how_often_gradients_are_added_and_what_backwards_read(profile):
    assert {v.name: v.contributions for v in profile.values} == {
        "x": 0, "conv": 1, "norm": 1, "relu": 2, "gt": 0, "where": 1, "add": 1, "pool": 1, "flatten": 1,
        "drop": 1, "end": 1,
    }  # fmt: skip
    names = [layer.name for layer in profile.layers]
    assert {names[layer]: read for layer, read in profile.backward_reads.items()} == {
        "conv": ("conv.weight",),
        "norm": ("norm.running_mean", "norm.running_var", "norm.weight"),
        "end": ("end.weight",),
    }


def test_a_node_that_reads_a_tensor_twice_is_one_reader_and_two_additions():
    def square(self, x):
        y = self.start(x)
        return y * y

    profile = profiled(model_of(square, start=nn.Linear(4, 4)), torch.ones(2, 4))
    assert [(i.value, i.readers) for i in profile.intermediates] == [("x", 1), ("start", 1)]
    assert {v.name: v.contributions for v in profile.values} == {"x": 0, "start": 2, "mul": 1}


def test_a_cast_of_a_weight_is_told_from_a_feature_map():
    def half(self, x):
        return self.start(x).bfloat16() @ self.weight.bfloat16()

    model = model_of(half, start=nn.Linear(8, 8), weight=nn.Parameter(torch.ones(8, 8)))
    profile = profiled(model, torch.ones(2, 8))
    assert [(i.kind, i.dtype, i.num_bytes) for i in profile.intermediates] == [
        ("feature map", "float32", 64),
        ("cast", "bfloat16", 128),
        ("feature map", "bfloat16", 32),
    ]


def test_a_tied_parameter_gets_as_many_gradients_as_layers_read_it():
    model, batches = build("gpt_tied")
    profile = profiled(model, batches[0][0][:4])
    (tied,) = [v for v in profile.values if v.name == "token_weight"]
    assert (tied.contributions, len(tied.users)) == (2, 2)


def plain_bytes(model, x):
    """Bytes of the distinct storages that a run of the model saves, without parameters and buffers."""
    kept = [t.untyped_storage() for t in (*model.parameters(), *model.buffers())]
    known, found = {s._cdata for s in kept}, {}

    def pack(tensor):
        storage = tensor.untyped_storage()  # kept alive, so that its number is its own
        found.setdefault(storage._cdata, storage)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    return sum(storage.nbytes() for key, storage in found.items() if key not in known)


COPIES = {"Teacher": 84}  # of a frozen parameter that forwards write to: of 20 floats, and of its first one
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ZOO if name not in ("residual", "gpt_tied")]


@pytest.mark.parametrize("name", ["residual", "gpt_tied", *SLOW])
def test_bytes_are_those_of_a_plain_run_and_of_the_layers(name):
    model, batches = build(name)
    x = batches[0][0][:4].clone()
    profile = profiled(model, x)
    expected = plain_bytes(model, x) + COPIES.get(name, 0)
    assert sum(i.num_bytes for i in profile.intermediates) == expected
    for number, layer in enumerate(profile.layers):
        own = [i for i in profile.intermediates if i.layer == number]
        assert sum(i.num_bytes for i in own) == layer.saved_bytes
        assert [i.order for i in own] == [*range(len(own))]
    for one in profile.intermediates:
        assert one.maker <= one.layer
        assert [*one.savers] == sorted({*one.savers})
        assert one.kind in KINDS


def test_a_profile_keeps_them_and_an_older_one_still_loads(profile, tmp_path):
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    data = json.loads((tmp_path / "profile.json").read_text())
    del data["intermediates"], data["backward_reads"]
    for value in data["values"]:
        del value["contributions"]
    (tmp_path / "old.json").write_text(json.dumps(data))
    old = Profile.load(tmp_path / "old.json")
    assert (old.intermediates, old.backward_reads) == ((), {})
    assert dataclasses.replace(old, values=profile.values) == dataclasses.replace(
        profile, intermediates=(), backward_reads={}
    )
    assert penstock.partition(old, stages=2).stages == penstock.partition(profile, stages=2).stages


@pytest.mark.parametrize(
    ("key", "number", "message"),
    [
        ("layers", {"saved_bytes": -1}, r"layers\[0\].saved_bytes is a number from 0 on, found -1"),
        ("layers", {"forward_seconds": -0.5}, "forward_seconds is a number from 0 on, found -0.5"),
        ("values", {"num_bytes": 10**30}, "num_bytes is a number from 0 on"),
        ("values", {"producer": -2}, "producer is a number from -1 on, found -2"),
        ("values", {"costs": {"raw": [1.0, -1.0, 0.0]}}, r"costs\[raw\]\[1\] is a number from 0 on"),
        ("values", {"gradient_costs": {"raw": [1.0, 1.0]}}, r"costs\[raw\] is bytes and two times"),
        ("num_samples", 0, "profile.num_samples is a number from 1 on, found 0"),
    ],
)
def test_numbers_that_nobody_measures_are_refused(key, number, message, profile, tmp_path):
    path = tmp_path / "profile.json"
    profile.save(path)
    data = json.loads(path.read_text())
    if key in ("layers", "values"):
        data[key][0] |= number
    else:
        data[key] = number
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=message):
        Profile.load(path)


def both(name):
    model, batches = build(name)
    example = (batches[0][0][:4].clone(),)
    without = copy.deepcopy(model).to("meta")
    return [measured(m, *example)[1] for m in (model, without)]


LARGER = [pytest.param(name, marks=pytest.mark.slow) for name in ("residual", "gpt_gelu_dropout")]


@pytest.mark.parametrize("name", ["mlp", "tied", *LARGER])
def test_a_profile_without_values_says_what_one_with_values_does(name):
    real, found = both(name)
    told = [(layer.name, layer.parameter_bytes, layer.saved_bytes) for layer in found.layers]
    assert told == [(layer.name, layer.parameter_bytes, layer.saved_bytes) for layer in real.layers]
    assert all(layer.packed_bytes == layer.saved_bytes for layer in found.layers)
    assert found.backward_reads == real.backward_reads
    assert found.refused == real.refused
    assert [v.contributions for v in found.values] == [v.contributions for v in real.values]
    assert (found.fingerprint, found.device, found.signature) == (real.fingerprint, "cpu", real.signature)
    assert sum(layer.forward_seconds for layer in found.layers) > 0
    assert sum(layer.backward_seconds for layer in found.layers) > 0
    zeros = [value.zero_fraction for value in found.values if value.name in ("_2", "_4")]
    assert name != "mlp" or all(0.2 < share < 0.8 for share in zeros)  # what a ReLU lets through


def test_every_codec_is_tried_on_what_passes_a_cut_and_on_its_gradient(tmp_path):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(288, 4))
    x = torch.randn(4, 3, 8, 8)
    graph = trace(net, (x,))
    found = penstock.measure(graph, (x,), repeats=1, packs=True)
    assert all(not v.costs for v in penstock.measure(graph, (x,), repeats=1).values)
    values = {v.producer: v for v in found.values}  # a ReLU writes zeros into what the convolution made
    assert {len(v.costs) for v in found.values} == {len(candidates(torch.float32))}
    assert values[0].costs["zero_value"][0] < 0.7 * values[0].num_bytes < values[0].costs["raw"][0]
    assert values[0].gradient_costs["zero_value"][0] < 0.7 * values[0].num_bytes
    assert values[-1].gradient_costs == {}
    assert all(seconds > 0 for v in found.values for cost in v.costs.values() for seconds in cost[1:])
    found.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == dataclasses.replace(found, graph=None)
    twice = found.of_samples(8).values[0]
    assert twice.costs["raw"][0] == 2 * found.values[0].costs["raw"][0]


def test_seconds_of_layers_add_up_to_those_of_a_run_in_which_some_layer_is_slow():
    slow, fast = (9.0, 1.0), (1.0, 1.0)
    assert module._typical([[fast, slow], [slow, fast], [fast, fast]]) == [[3.0, 3.0], [3.0, 3.0]]
    assert module._typical([[(0.0, 0.0)]]) == [[0.0, 0.0]]


def test_one_layer_at_a_time_has_values(monkeypatch):
    alive, most = [], []

    def watched(*args):
        assert [one for one in alive if one() is not None] == []
        parts = parts_with_random_values(*args)
        alive.extend(weakref.ref(p) for m in parts.modules.values() for p in m.parameters())
        most.append(sum(p.nbytes for m in parts.modules.values() for p in m.parameters()))
        assert all(not p.is_meta for m in parts.modules.values() for p in m.parameters())
        return parts

    monkeypatch.setattr(module, "parts_with_random_values", watched)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 4))
    example = (torch.randn(3, 8),)
    measured(model, *example)
    assert most == [8 * 9 * 4, 0, 16 * 4, 4 * 9 * 4]
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_an_example_without_values_is_as_good_but_for_its_integers():
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 4)).bfloat16()
    example = (torch.zeros(3, 7, dtype=torch.int64, device="meta"),)
    found = measured(model, *example)[1]
    assert found.layers[0].parameter_bytes == 5 * 8 * 2
    assert found.input_shapes == ((3, 7),)
    assert found.device == "cpu"
    assert found.signature is not None
    assert found.signature.values == ((0,),)
    assert penstock.partition(found, stages=2).num_stages == 2


def test_seconds_are_those_of_layers_together_by_the_marks_of_the_device(monkeypatch):
    device = Noting(is_gpu=True)
    monkeypatch.setattr(module, "device_of", lambda found: device)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 4)
    graph = trace(model, (x,))
    profile = module.measure(graph, (x,), repeats=1)
    marks = ["now"] * 24 + ["synchronize"] + ["seconds"] * 6
    assert device.asked == marks + ["now"] * 6 + ["synchronize"] + ["seconds"] * 4
    # Apart, the second run has marks from 2 ** 12 on, of each layer's backward the last two of four.
    # Together, marks are 2 ** 24 and on: forwards between the first four, the backward between the last two.
    assert [layer.forward_seconds for layer in profile.layers] == [2.0**24, 2.0**25, 2.0**26]
    apart = [2.0 ** (14 + 4 * i) for i in range(3)]
    backwards = [2.0**28 * backward / sum(apart) for backward in apart]
    assert [layer.backward_seconds for layer in profile.layers] == pytest.approx(backwards)


def test_zeros_are_counted_without_a_wait_until_they_are_asked_for():
    with Reads() as reads:
        counted = zero_count(torch.tensor([0.0, 1.0, 0.0, 2.0]))
        assert reads.count == 0
        assert counted() == 0.5
        assert reads.count == 1
    assert zero_count(torch.zeros(0))() == zero_count(torch.ones(2).to_sparse())() == 0.0
