"""Placement of the stages of a process on devices; unsuitable devices and lack of room are refused.

A rank computes on one device, or spreads its stages over several of one kind; the plan's device of a stage
counts more than the device of the model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...compression.errors import ConfigError, PlanError
from ...compression.names import GPU
from ...stages.device import Device, device_of, is_gpu, memory_on
from ...stages.places import device_given, device_named, home_of
from ...stages.plan.plan import Plan
from ...stages.tracing.layers import parts_of
from ...stages.units import show_bytes
from ..distributed.launcher import local_rank
from ..distributed.process_group import World, thread_of
from .agreement import Agreement
from .ownership import Ownership
from .step_planner import Steps

Given = str | torch.device | Device | None


def rank_device(model: nn.Module, world: World, given: Given) -> Device:
    """Return this rank's device for stages that name none: the given one, the world's, or the model's.

    Raises: ConfigError, PlanError: it is not there, or two were given."""
    if given is None:
        return world.device if world.has_device else device_of(home_of(model))
    device = device_given(given, local_rank=_number(world))
    if world.has_device and world.device.torch != device.torch:
        raise PlanError(
            f"a rank computes on one device, found device={device.torch} and a World on "
            f"{world.device.torch}; give one of them"
        )
    return world.device if world.has_device else device


def _number(world: World) -> int:
    """Number of this rank among those of its machine."""
    thread = thread_of(world.group)
    return local_rank() if thread is None else thread


def stage_devices(plan: Plan, world: World, device: Device) -> dict[int, Device]:
    """Return the device of each stage of this process, whose rank computes on ``device``.

    Raises: PlanError: one names a missing device, or they are of several kinds."""
    found: dict[int, Device] = {}
    for number, stage in enumerate(plan.stages):
        if not (world.is_alone or world.rank in stage.ranks):
            continue
        same = stage.device is None or (stage.device == GPU and is_gpu(device.torch))
        try:
            found[number] = device if same else device_named(str(stage.device), local_rank=_number(world))
        except ConfigError as error:
            raise PlanError(f"stage {number} of the plan: {error}") from error
    kinds = {one.torch.type: f"stage {number} on {one.torch}" for number, one in found.items()}
    if len(kinds) > 1:
        raise PlanError(
            f"the stages of one process compute on one kind of device, found {' and '.join(kinds.values())}; "
            "name one kind for them in the plan, or give them ranks of their own"
        )
    return found


def check_devices(agreement: Agreement, plan: Plan, devices: Mapping[int, Device]) -> None:
    """Refuse ranks of several kinds where the planner chose the cuts, and GPUs that are too small.

    Collective; rank 0 says by a warning where ranks share a GPU.
    Raises: PlanError: it names the GPU, the plan's bytes and the least that would do."""
    here: dict[torch.device, int] = {}
    for number, device in devices.items():
        if is_gpu(device.torch):
            here[device.torch] = here.get(device.torch, 0) + plan.stages[number].memory_bytes
    rooms = [[str(gpu), needed, *memory_on(gpu)] for gpu, needed in here.items()]
    told = agreement.exchange("its devices", [next(iter(devices.values())).torch.type, rooms])
    kinds = [kind for kind, _ in told]
    if len(set(kinds)) > 1 and plan.asked is not None and not plan.asked.cuts:
        raise PlanError(
            "layers were measured on one kind of device, so ranks on several kinds take cuts by hand, found "
            f"ranks on {', '.join(kinds)} and no cuts; plan with cuts=[...]"
        )
    shared: dict[str, list[tuple[int, Sequence[Any]]]] = {}
    for rank, (_, theirs) in enumerate(told):
        for room in theirs:
            shared.setdefault(room[2], []).append((rank, room))
    if agreement.world.size == plan.num_ranks:  # else one process tries what was planned for several
        _check_room(list(shared.values()))
    if crowded := [rooms for rooms in shared.values() if len(rooms) > 1]:
        if agreement.world.rank == 0:
            said = "; ".join(f"{rooms[0][1][0]} by ranks {_ranks(rooms)}" for rooms in crowded)
            warnings.warn(f"there are more ranks than GPUs, which are shared: {said}", stacklevel=4)


def _check_room(gpus: Sequence[Sequence[tuple[int, Sequence[Any]]]]) -> None:
    """``gpus``: for each, the ranks there, each with its name, its need, the GPU, the free bytes, its
    present bytes."""
    for rooms in gpus:
        needed = sum(room[1] for _, room in rooms)
        free = min(room[3] for _, room in rooms) + sum(room[4] for _, room in rooms)
        if needed > free:
            raise PlanError(
                f"a GPU holds what the plan lays on it, found {rooms[0][1][0]} with {show_bytes(free)} free "
                f"for rank {_ranks(rooms)}, whose stages take {show_bytes(needed)}, the least that would do; "
                f"plan with memory={free // len(rooms) // (1 << 20)}MiB, more ranks, or tier=host"
            )


def _ranks(rooms: Sequence[tuple[int, Any]]) -> str:
    return ", ".join(str(rank) for rank, _ in rooms)


def spread(
    model: nn.Module, own: Ownership, steps: Steps, devices: Mapping[int, Device], *, last: int
) -> None:
    """Move what each stage of this process holds to where it computes; the model is on one device by now.

    Raises: PlanError: two stages on different devices read one buffer."""
    if len({device.torch for device in devices.values()}) < 2:
        return
    homes: dict[int, tuple[int, torch.Tensor]] = {}
    for stage, device in devices.items():
        held: list[torch.Tensor] = [*own.tensors[stage]]
        registered = {id(buffer) for buffer in model.buffers()}
        for mode in ("train", "eval"):
            parts = parts_of(model, *steps.layers(mode, stage), output=stage == last)
            held += [buffer for module in parts.modules.values() for buffer in module.buffers()]
            held += [tensor for tensor in parts.tensors.values() if id(tensor) in registered]
        for tensor in held:
            first, _ = homes.setdefault(id(tensor), (stage, tensor))
            if devices[first].torch != device.torch:
                raise PlanError(
                    f"a buffer is on one device, found one that stages {first} and {stage} read, on "
                    f"{devices[first].torch} and {device.torch}; give both stages one device"
                )
            tensor.data = tensor.data.to(device.torch)
