"""Running statistics that forwards set aside: added in order they are the plain model's, bit for bit."""

import copy
from typing import Any

import pytest
import torch
from reference import same_bits
from torch import nn

from penstock.compression.errors import StageError
from penstock.pipeline.runtime.running_statistics import RunningStatistics, batch_norms


class _OnlyOne:
    """The group of a replica without others."""

    size = 1

    def all_gather(self, mine, *, at):
        return [mine]


ALONE: Any = _OnlyOne()


def networks(momentum, dtype=torch.float32) -> Any:
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(n, momentum=momentum) for n in (3, 8)]
    model = nn.Sequential(norms[0], nn.Conv2d(3, 8, 3), norms[1], nn.ReLU()).to(dtype)
    return model, copy.deepcopy(model)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.1, 1 / 3, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_what_is_set_aside_adds_up_to_the_plain_statistics(momentum, dtype, layout):
    add_up(*networks(momentum, dtype), dtype=dtype, layout=layout)


def add_up(model, plain, *, dtype=torch.float32, layout=torch.contiguous_format):
    """Forwards of a model leave its statistics, and their exchange gives it those of the plain one."""
    statistics = RunningStatistics(batch_norms(dict(model.named_modules())))
    for _ in range(20):
        batch = [(torch.randn(3, 3, 6, 6, dtype=dtype) + 0.2).to(memory_format=layout) for _ in range(3)]
        before = {key: value.clone() for key, value in model.state_dict().items()}
        for number, x in enumerate(batch):
            with statistics.forward(number):
                assert same_bits(model(x), plain(x))
        assert all(same_bits(value, before[key]) for key, value in model.state_dict().items())
        statistics.exchange(ALONE, [0, 0, 0])
        statistics.begin()
        for key, value in plain.state_dict().items():
            assert same_bits(model.state_dict()[key], value), key


@pytest.mark.parametrize("shared", [["running_mean", "running_var"], ["num_batches_tracked"]], ids="+".join)
@pytest.mark.parametrize("momentum", [0.1, pytest.param(None, marks=pytest.mark.slow)])
def test_norms_that_share_a_buffer_add_to_it_one_after_the_other(shared, momentum):
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.BatchNorm2d(3, momentum=momentum) for _ in range(3)))
    for name in shared:
        setattr(model[2], name, getattr(model[0], name))
    add_up(model, copy.deepcopy(model))


def test_a_frozen_norm_reads_its_own_and_is_left_alone():
    model, plain = networks(0.1)
    for one in (model, plain):
        one[2].eval()
        one[2].running_mean += 1
    statistics = RunningStatistics(batch_norms(dict(model.named_modules())))
    x = torch.randn(3, 3, 6, 6)
    with statistics.forward(0):
        assert same_bits(model(x), plain(x))
    statistics.exchange(ALONE, [0])
    assert all(same_bits(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))


def test_what_a_kernel_adds_otherwise_is_refused_by_name_and_leaves_the_model_as_it_was():
    model, plain = networks(0.1)
    statistics = RunningStatistics(batch_norms(dict(model.named_modules())))
    with (
        pytest.raises(StageError, match=r"how 0 adds them for an input of strides .* is not known"),
        statistics.forward(0),
    ):
        model(torch.randn(3, 6, 6, 6)[:, ::2])  # an input with gaps is summed in float64
    with pytest.raises(StageError, match="runs once in a forward, and 0 ran twice"), statistics.forward(1):
        model[0](model[0](torch.randn(3, 3, 6, 6)))
    assert all(same_bits(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))
    assert model[0].momentum == 0.1
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_a_norm_may_be_called_by_keyword_and_on_elements_that_are_one():
    torch.manual_seed(0)
    norm: Any = nn.BatchNorm1d(3)
    statistics, x = RunningStatistics({"norm": norm}), torch.randn(4, 3)
    with statistics.forward(0):
        norm(input=x)
    statistics.exchange(ALONE, [0])
    plain = nn.BatchNorm1d(3)
    plain(x)
    assert same_bits(norm.running_var, plain.running_var)
    with statistics.forward(1), pytest.raises(StageError, match=r"strides \(3, 1, 0\)"):
        norm(x.unsqueeze(2).expand(-1, -1, 5))


class Reading(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.norm, self.what = nn.BatchNorm1d(3), what

    def forward(self, x):
        return self.what(self.norm, x)


@pytest.mark.parametrize(
    "what",
    [
        lambda norm, x: norm(x) + norm.running_mean,
        lambda norm, x: norm(x) * norm.num_batches_tracked.item(),
        lambda norm, x: nn.functional.batch_norm(x, norm.running_mean, norm.running_var, training=True),
    ],
)
def test_statistics_that_a_larger_layer_uses_by_itself_are_refused(what):
    model: Any = Reading(what)
    statistics = RunningStatistics({"layer.norm": model.norm}, inside={"layer.norm"})
    refused = pytest.raises(StageError, match=r"a layer that uses layer\.norm\.\w+ by itself")
    with statistics.forward(0), refused:
        model(torch.randn(4, 3))
    model.what = lambda norm, x: norm(x.to(norm.running_mean.dtype)).view(-1, len(norm.running_var))
    plain, x = copy.deepcopy(model), torch.randn(4, 3)
    with statistics.forward(1):
        found = model(x)
    assert same_bits(found, plain(x))
