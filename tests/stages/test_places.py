"""Device of a rank: the meaning of names on a machine with as many GPUs as a test says."""

import types
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock import ConfigError, PlanError
from penstock.stages.device import CPU, CudaDevice, device_named, device_of, home_of


@pytest.fixture
def gpus(monkeypatch):
    """A machine with so many GPUs, the last of which is the current one."""

    def have(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: count - 1)

    return have


@pytest.mark.parametrize(
    ("count", "name", "local_rank", "found"),
    [
        *((0, "cpu", 1, "cpu"), (0, "auto", 1, "cpu"), (2, "cpu", 1, "cpu"), (2, "auto", 1, "cuda:1")),
        *((2, "cuda", 0, "cuda:0"), (2, "cuda:0", 1, "cuda:0"), (2, "cuda:1", 0, "cuda:1")),
        *((2, "cuda", 3, "cuda:1"), (1, "cuda", 3, "cuda:0")),  # more ranks than GPUs share them
    ],
)
def test_a_name_means_a_device_of_this_rank(count, name, local_rank, found, gpus):
    gpus(count)
    assert str(device_named(name, local_rank=local_rank).torch) == found


@pytest.mark.parametrize(
    ("count", "name", "told"),
    [
        (0, "cuda", "needs a GPU.* take device=cpu"),
        (0, "cuda:0", "needs a GPU"),
        (2, "cuda:2", "which has cuda:0, cuda:1"),
        *((2, name, "known are cpu, cuda, cuda:N and auto") for name in ("tpu", "meta", "cuda:", "")),
    ],
)
def test_what_is_not_there_is_refused_in_one_sentence(count, name, told, gpus):
    gpus(count)
    with pytest.raises(ConfigError, match=f"device={name} .*{told}"):
        device_named(name)


def test_a_device_is_one_object_and_a_gpu_without_a_number_is_the_current_one(gpus):
    gpus(3)
    assert device_of(torch.device("cuda")) is device_of(torch.device("cuda", 2)) is device_named("cuda:2")
    assert device_of(torch.device("cuda", 1)) is not device_of(torch.device("cuda", 2))
    assert isinstance(device_named("cuda:1"), CudaDevice)
    assert device_of(CPU) is device_of(torch.device("cpu")) is device_named("cpu")


def test_a_model_is_at_home_where_its_parameters_are_or_else_its_buffers():
    with FakeTensorMode():
        assert str(home_of(nn.Linear(2, 2, device="cuda:1"))) == "cuda:1"
        assert str(home_of(nn.BatchNorm1d(2, affine=False, device="cuda:1"))) == "cuda:1"
    assert home_of(nn.ReLU()) == home_of(nn.Linear(2, 2)) == home_of(nn.Linear(2, 2, device="meta")) == CPU


class Elsewhere(nn.Module):
    """A model on a kind of device that torch knows and no rank computes on."""

    def parameters(self, recurse=True) -> Any:
        return iter([types.SimpleNamespace(device=torch.device("xpu:0"), is_meta=False)])


def test_a_model_on_several_devices_or_elsewhere_is_refused():
    with FakeTensorMode():
        two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="cuda:0"))
        with pytest.raises(PlanError, match=r"found cpu, cuda:0; move it: model\.to\('cpu'\)"):
            home_of(two)
        with pytest.raises(PlanError, match="computes on one of cpu, cuda, found a model on xpu:0"):
            home_of(Elsewhere())
