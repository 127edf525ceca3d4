"""A model on the meta device is measured with the values of one layer at a time, which are random."""

import copy
import weakref

import pytest
import torch
from profiles import measured
from torch import nn
from zoo import build

import penstock
from penstock.stages.planner import layer_values, timed


def both(name):
    model, batches = build(name)
    example = (batches[0][0][:4].clone(),)
    without = copy.deepcopy(model).to("meta")
    return [measured(m, *example)[1] for m in (model, without)]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("residual", "gpt_gelu_dropout")]


@pytest.mark.parametrize("name", ["mlp", "tied", *SLOW])
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


def test_values_are_random_and_what_a_relu_lets_through_is_about_half():
    _, found = both("mlp")
    zeros = [value.zero_fraction for value in found.values if value.name in ("_2", "_4")]
    assert len(zeros) == 2
    assert all(0.2 < share < 0.8 for share in zeros)


def test_one_layer_at_a_time_has_values(monkeypatch):
    alive, most = [], []

    def watched(*args):
        assert [one for one in alive if one() is not None] == []
        parts = layer_values.parts_with_values(*args)
        alive.extend(weakref.ref(p) for m in parts.modules.values() for p in m.parameters())
        most.append(sum(p.nbytes for m in parts.modules.values() for p in m.parameters()))
        assert all(not p.is_meta for m in parts.modules.values() for p in m.parameters())
        return parts

    monkeypatch.setattr(timed, "parts_with_values", watched)
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
    assert (found.signature.lowest, found.signature.highest) == ((0,), (0,))
    assert penstock.partition(found, stages=2).num_stages == 2
