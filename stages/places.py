"""Device of a rank, by what people write: a device's name, or the model that they have put there.

Everything here takes names and gives Devices; below it, functions take what they are given."""

from __future__ import annotations

import torch
from torch import nn

from ..compression.errors import ConfigError, PlanError
from ..compression.names import AUTO, GPU, HOST, is_device
from .device import CPU, KINDS, Device, device_of, num_gpus


def device_named(name: str, *, local_rank: int = 0) -> Device:
    """cpu; cuda, the GPU with the number of the rank, counted around; cuda:N; auto, cuda if there is one.

    Args:    local_rank: the number of this rank among those of its machine.
    Raises:  ConfigError: the name is not known, or the GPU is not there."""
    if name != AUTO and not is_device(name):
        raise ConfigError(f"device={name} is not known; known are {HOST}, {GPU}, {GPU}:N and {AUTO}")
    count = 0 if name == HOST else num_gpus()
    if name == HOST or (name == AUTO and not count):
        return device_of(CPU)
    if not count:
        raise ConfigError(
            f"device={name} needs a GPU, and torch {torch.__version__} finds none; take device={HOST}"
        )
    _, _, number = name.partition(":")
    index = int(number) if number else local_rank % count
    if index >= count:
        known = ", ".join(f"{GPU}:{i}" for i in range(count))
        raise ConfigError(f"device={name} is not on this machine, which has {known}; take one of these")
    return device_of(torch.device(GPU, index))


def device_given(given: str | torch.device | Device, *, local_rank: int = 0) -> Device:
    """Return what a person means by a name, by torch's own device, or by a Device.

    Raises: ConfigError: as ``device_named``."""
    if isinstance(given, Device):
        return given
    return device_named(str(given), local_rank=local_rank)


def home_of(model: nn.Module) -> torch.device:
    """Device of the parameters of ``model``, or of its buffers if it has none; the CPU without either.

    Raises: PlanError: they are on several devices, or on one where no rank computes."""
    tensors = [*model.parameters()] or [*model.buffers()]
    found = {tensor.device: None for tensor in tensors if not tensor.is_meta}
    if len(found) > 1:
        places = ", ".join(map(str, found))
        raise PlanError(
            f"a model is on one device, and the stages are spread from there, found {places}; move it: "
            f"model.to({str(next(iter(found)))!r})"
        )
    home = next(iter(found), CPU)
    if home.type not in KINDS:
        raise PlanError(
            f"a rank computes on one of {', '.join(KINDS)}, found a model on {home}; move it: model.to('cpu')"
        )
    return home
