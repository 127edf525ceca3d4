"""The one formula of memory: how often the bytes of some layers are there at once."""

import dataclasses
import itertools

import pytest
import torch
from profiles import layer_of, measured, profile_of
from small_pipelines import model_of
from torch import nn

from penstock import partition
from penstock.pipeline.partition.costs import Largest
from penstock.stages.plan.memory_model import copies

WEIGHTS, SAVED, PACKED = 1000, 100, 10


@pytest.mark.parametrize(
    ("in_flight", "options", "expected"),
    [
        (0, {}, 3000),
        (4, {}, 3000 + 400),
        (4, {"old_versions": 3}, 6000 + 400),
        (4, {"optimizer_state": 0.0}, 2000 + 400),
        (4, {"optimizer_state": 2.0}, 4000 + 400),
        (4, {"optimizer_state": 0.0005}, 2001 + 400),
        (1, {"tier": "packed"}, 3000 + 100),
        (2, {"tier": "packed"}, 3000 + 200),
        (4, {"tier": "packed"}, 3000 + 200 + 40),
        (4, {"tier": "host"}, 3000 + 200 + 40),
        (4, {"tier": "host", "device": "cuda"}, 3000 + 200),
        (4, {"tier": "disk"}, 3000 + 200),
        (4, {"tier": "disk", "device": "cuda"}, 3000 + 200),
        (4, {"tier": "packed", "device": "cuda"}, 3000 + 200 + 40),
        (0, {"old_versions": 3, "weights_tier": "packed"}, 6000),
        (0, {"old_versions": 3, "weights_tier": "host"}, 6000),
        (0, {"old_versions": 3, "weights_tier": "host", "device": "cuda"}, 5000),
        (0, {"old_versions": 1, "weights_tier": "host", "device": "cuda"}, 4000),
        (0, {"old_versions": 3, "weights_tier": "disk"}, 5000),
    ],
)
def test_what_is_there(in_flight, options, expected):
    assert copies(in_flight, **options).of(parameters=WEIGHTS, saved=SAVED, packed=PACKED) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"parameters_tier": "packed"}, 3000 + 150 + 2 * 70),
        ({"parameters_tier": "host", "optimizer_state": 3.0}, 5000 + 5 * 70),
        ({"parameters_tier": "packed", "device": "cuda"}, 3000 + 150 + 2 * 70),
        ({"parameters_tier": "host", "device": "cuda"}, 150 + 2 * 70),
        ({"parameters_tier": "disk"}, 150 + 2 * 70),
    ],
)
def test_of_a_mirror_neighbours_are_there_or_all_that_belongs_to_one(options, expected):
    sizes = {"parameters": WEIGHTS, "saved": SAVED, "packed": PACKED, "largest": 70, "neighbours": 150}
    assert copies(4, **options).of(**sizes) == expected + 400


def test_parameters_that_stay_count_where_the_others_leave():
    for tier, expected in ("disk", 3 * 200), ("packed", 0), ("device", 0):
        there = copies(4, parameters_tier=tier)
        assert there.of(parameters=WEIGHTS, staying=200) - there.of(parameters=WEIGHTS) == expected


def test_the_largest_layer_of_any_run_of_layers():
    for count in (1, 2, 3, 5, 8, 13):
        numbers = [(7 * i) % 11 for i in range(count)]
        largest = Largest(list(numbers))
        for start, end in itertools.combinations_with_replacement(range(count + 1), 2):
            assert largest.of(start, end) == max(numbers[start:end], default=0)


def test_the_search_counts_what_a_tier_leaves():
    net = profile_of([layer_of(f"l{i}", saved=100, packed=10) for i in range(4)])
    options = {"stages": 2, "micro_batches": 8, "schedule": "gpipe"}
    assert [s.memory_bytes for s in partition(net, **options).stages] == [1600, 1600]
    assert [s.memory_bytes for s in partition(net, **options, tier="packed").stages] == [560, 560]
    old = dataclasses.replace(net, layers=[dataclasses.replace(x, packed_bytes=None) for x in net.layers])
    assert [s.memory_bytes for s in partition(old, **options, tier="packed").stages] == [1600, 1600]
    far = dataclasses.replace(net, device="cuda")
    assert [s.memory_bytes for s in partition(far, **options, tier="host").stages] == [400, 400]


def test_a_profile_says_what_is_left_of_saved_bytes_without_zeros():
    first = nn.Linear(64, 64)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(64, 8))
    with torch.no_grad():
        first.weight.zero_()
        first.bias.copy_(torch.tensor([1.0, -1.0] * 32))
    linear, relu, last = measured(model, torch.randn(16, 64))[1].layers
    size = 16 * 64 * 4
    assert (linear.saved_bytes, linear.packed_bytes) == (size, size)  # no frame is longer than its tensor
    assert (relu.saved_bytes, relu.packed_bytes) == (size, size // 2 + size // 32)
    assert (last.saved_bytes, last.packed_bytes) == (0, 0)


class Mask(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward((x > 0).to(torch.uint16))  # torch counts none of these
        return x.relu()

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * ctx.saved_tensors[0].to(gradient.dtype)


def test_what_torch_cannot_count_is_taken_to_have_no_zeros():
    model = nn.Sequential(nn.Linear(6, 6), model_of(lambda self, x: Mask.apply(x)), nn.Linear(6, 2))
    masked = measured(model, torch.randn(4, 6))[1].layers[1]
    assert masked.saved_bytes == masked.packed_bytes == 4 * 6 * 2
