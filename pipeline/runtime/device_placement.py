"""Placement of the stages of a process on devices, and the values of a model on the meta device.

The plan's device of a stage counts more than the device of the model. Values are read or made for the stages
of this process alone, so no rank ever has the whole model."""

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...compression.errors import ConfigError, PlanError
from ...compression.names import GPU
from ...stages.device import Device, device_named, device_of, home_of, is_gpu, memory_on
from ...stages.plan.plan import Plan
from ...stages.safetensors_io import WeightsFile
from ...stages.seeds import layer_seed, seeded
from ...stages.torch_private import version_of
from ...stages.tracing.layers import parts_of
from ...stages.tracing.meta_model import has_meta
from ...stages.tracing.tracer import LayerGraph
from ...stages.units import show_bytes
from ..distributed.launcher import local_rank
from ..distributed.process_group import World, thread_of
from .agreement import Agreement
from .ownership import Ownership
from .state import readers_of_buffers
from .step_planner import Steps

Given = str | torch.device | Device | None
Devices = Mapping[int, Device]  # by stage of this process


def rank_device(model: nn.Module, world: World, given: Given) -> Device:
    """Return this rank's device for stages that name none: the given one, the world's, or the model's."""
    ours = world.device if world.has_device else None
    if given is None:
        return ours or device_of(home_of(model))
    device = given if isinstance(given, Device) else device_named(str(given), local_rank=_number(world))
    if ours is not None and ours.torch != device.torch:
        raise PlanError(
            f"a rank computes on one device, found device={device.torch} and a World on {ours.torch}; give "
            "one of them"
        )
    return ours or device


def _number(world: World) -> int:
    """Number of this rank among those of its machine."""
    thread = thread_of(world.group)
    return local_rank() if thread is None else thread


def stage_devices(plan: Plan, world: World, device: Device) -> dict[int, Device]:
    """Return the device of each stage of this process, whose rank computes on ``device``; raises
    PlanError."""
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
    """Refuse ranks of several kinds where the planner chose the cuts, and GPUs that are too small;
    collective."""
    here: dict[torch.device, int] = {}
    for number, device in devices.items():
        if is_gpu(device.torch):
            here[device.torch] = here.get(device.torch, 0) + plan.stages[number].held_bytes
    rooms = [[str(gpu), needed, *memory_on(gpu)] for gpu, needed in here.items()]
    rows = agreement.exchange("its devices", [next(iter(devices.values())).torch.type, rooms])
    kinds = [kind for kind, _ in rows]
    if len(set(kinds)) > 1 and plan.asked is not None and not plan.asked.cuts:
        raise PlanError(
            "layers were measured on one kind of device, so ranks on several kinds take cuts by hand, found "
            f"ranks on {', '.join(kinds)} and no cuts; plan with cuts=[...]"
        )
    # By GPU the ranks there, each with its name, its need, the GPU, the free bytes, and those it has now.
    shared: dict[str, list[tuple[int, Sequence[Any]]]] = {}
    for rank, (_, theirs) in enumerate(rows):
        for room in theirs:
            shared.setdefault(room[2], []).append((rank, room))
    crowded = []
    for gpu in shared.values():
        ranks, name = ", ".join(str(rank) for rank, _ in gpu), gpu[0][1][0]
        needed = sum(room[1] for _, room in gpu)
        free = min(room[3] for _, room in gpu) + sum(room[4] for _, room in gpu)
        # Else one process tries what was planned for several.
        if needed > free and agreement.world.size == plan.num_ranks:
            raise PlanError(
                f"a GPU holds what the plan lays on it, found {name} with {show_bytes(free)} free for rank "
                f"{ranks}, whose stages take {show_bytes(needed)}, the least that would do; plan with "
                f"memory={free // len(gpu) // (1 << 20)}MiB, more ranks, or tier=host"
            )
        crowded += [f"{name} by ranks {ranks}"] if len(gpu) > 1 else []
    if crowded and agreement.world.rank == 0:
        text = f"there are more ranks than GPUs, which are shared: {'; '.join(crowded)}"
        warnings.warn(text, stacklevel=4)


def spread(model: nn.Module, own: Ownership, steps: Steps, devices: Devices) -> None:
    """Move what each stage of this process holds to where it computes; the model is on one device by now."""
    if len({device.torch for device in devices.values()}) < 2:
        return
    homes: dict[int, tuple[int, torch.Tensor]] = {}
    for stage, device in devices.items():
        held: list[torch.Tensor] = [*own.tensors[stage]]
        registered = {id(buffer) for buffer in model.buffers()}
        for mode in ("train", "eval"):
            parts = parts_of(model, *steps.layers(mode, stage), output=stage == steps.plan.num_stages - 1)
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


Init = Callable[[str, torch.Tensor], Any]
BEFORE = -1  # the step of the seeds that values are made from: training begins with 0
_UNWRITTEN = 0xA5  # what the bytes are that ``init_weights`` is to write over


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """Source of a model's values: ``file``, and ``init`` for what that leaves out, or for all."""

    file: WeightsFile | None
    init: Init | None
    seed: int

    @property
    def description(self) -> str:
        """Text that all ranks must have alike."""
        return f"{self.file.digest if self.file else None} {getattr(self.init, '__qualname__', self.init)}"

    def give(self, name: str, out: torch.Tensor, *, key: str | None, device: Device) -> None:
        """Fill ``out``, the tensor ``name`` of the model, which the file has as ``key`` if it does."""
        if self.file is not None and key is not None:
            self.file.read(key, out)
            return
        assert self.init is not None
        _memory(out).fill_(_UNWRITTEN)
        before = version_of(out)
        with seeded(layer_seed(self.seed, BEFORE, 0, name), device.generators), device.current():
            made = self.init(name, out)
        if isinstance(made, torch.Tensor) and made.data_ptr() != out.data_ptr():
            raise PlanError(
                f"init_weights writes into the tensor that it is given, and returned another for {name}; "
                "write tensor.copy_(values)"
            )
        # A write through .data gives no new version.
        if version_of(out) == before and out.numel() and bool((_memory(out) == _UNWRITTEN).all()):
            raise PlanError(
                f"init_weights gives every tensor that it is asked for its values, and left {name} "
                f"{tuple(out.shape)} as it was; write into it, or load it from a file (load_weights)"
            )


def values_of(
    model: nn.Module, *, load_weights: str | Path | None, init_weights: Init | None, seed: int
) -> Values | None:
    """Return the source of the values of ``model``; None where it has them; raises PlanError, ConfigError."""
    given = {"load_weights": load_weights, "init_weights": init_weights}
    asked = ", ".join(name for name, value in given.items() if value is not None)
    if init_weights is not None and not callable(init_weights):
        raise PlanError(f"init_weights is a function of (name, tensor), found {init_weights!r}")
    if not has_meta(model):
        if asked:
            raise PlanError(
                f"{asked} gives values to a model on the meta device, and this one has its own; build it "
                "under torch.device('meta'), or leave that out and load them by model.load_state_dict()"
            )
        return None
    if not asked:
        named = (*model.named_parameters(), *model.named_buffers())
        name = next(name for name, tensor in named if tensor.is_meta)
        raise PlanError(
            f"a model on the meta device has no values to train, found {name} there; give Pipeline "
            "load_weights=FILE.safetensors, or init_weights=a function of (name, tensor) that fills each"
        )
    file = None if load_weights is None else WeightsFile(load_weights)
    return Values(file=file, init=init_weights, seed=seed)


def give_values(
    model: nn.Module, values: Values, *, own: Ownership, steps: Steps, graph: LayerGraph, devices: Devices
) -> None:
    """Give the parameters and buffers of the stages of this process their values, in new tensors that take
    the places of those on the meta device; what has values keeps them, unless the file has it too."""
    places: dict[int, list[str]] = {}
    for name, tensor in _registered(model):
        places.setdefault(id(tensor), []).append(name)
    keys = _keys(model, values, places)
    tensors = {id(tensor): tensor for _, tensor in _registered(model)}
    for stage, needed in _needed(model, own, steps, graph).items():
        for key in needed:
            if key not in tensors:  # another stage of this process has made it
                continue
            tensor, names, device = tensors.pop(key), places[key], devices[stage]
            if not tensor.is_meta and keys[names[0]] is None:
                continue
            filled = _filled(tensor, names[0], values, keys[names[0]], device)
            for path, _, attribute in (name.rpartition(".") for name in names):  # tied tensors stay tied
                setattr(model.get_submodule(path), attribute, filled)


def _filled(tensor: torch.Tensor, name: str, values: Values, key: str | None, device: Device) -> torch.Tensor:
    """A tensor like ``tensor`` with its values, or itself where it has memory."""
    with torch.no_grad():
        made = torch.empty_like(tensor, device=device.torch) if tensor.is_meta else tensor.detach()
        values.give(name, made, key=key, device=device)
    if not tensor.is_meta:
        return tensor
    if not isinstance(tensor, nn.Parameter):
        return made.requires_grad_(tensor.requires_grad)
    parameter = nn.Parameter(made.detach(), tensor.requires_grad)  # its versions begin with its values
    vars(parameter).update(vars(tensor))
    return parameter


def _registered(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _keys(model: nn.Module, values: Values, places: Mapping[int, list[str]]) -> dict[str, str | None]:
    """For the first name of every tensor the one by which the file has it, None where ``init_weights`` makes
    it; the same on every rank."""
    known = dict(_registered(model))
    if values.file is None:
        return {names[0]: None for names in places.values()}
    path, entries, listed = values.file.path, values.file.entries, model.state_dict(keep_vars=True).keys()
    if unknown := [name for name in entries if name not in known]:
        raise PlanError(
            f"{path} is loaded whole, and {len(unknown)} of its tensors are none of the model's, the first "
            f"is {unknown[0]}; give a file of this model's state_dict()"
        )
    found: dict[str, str | None] = {}
    for first, *others in places.values():
        tensor, names = known[first], (first, *others)
        here = [name for name in names if name in entries]
        found[first] = here[-1] if here else None  # the one that load_state_dict would copy last
        for name in here:
            if (entries[name].dtype, entries[name].shape) != (tensor.dtype, tuple(tensor.shape)):
                form = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
                raise PlanError(
                    f"a file has the dtypes and shapes of the model, and {name} is {entries[name].form} in "
                    f"{path} and {form} in the model; convert the file, or make the model as it is"
                )
        if here or not tensor.is_meta:
            continue
        if any(name in listed for name in names):
            raise PlanError(
                f"{path} gives every parameter and buffer of the model's state_dict() its values, and has no "
                f"{first}; give a file that has it, or leave the file out and make all by init_weights"
            )
        if values.init is None:
            raise PlanError(
                f"{first} is a buffer that no state_dict has, so {path} does not give it values; add "
                "init_weights=, which then is asked for such buffers"
            )
    return found


def _needed(model: nn.Module, own: Ownership, steps: Steps, graph: LayerGraph) -> dict[int, list[int]]:
    """By stage of this process the identities of the tensors that it needs: its parameters, what its layers
    read in both modes but tied parameters that come from another stage, on stage 0 what no layer reads."""
    readers, found, last = readers_of_buffers(model, graph, own.layers), {}, steps.plan.num_stages - 1
    for stage, named in own.here.items():
        mine = [parameter for _, parameter in named]
        mine += [buffer for buffer in model.buffers() if stage in readers.get(id(buffer), {0})]
        for mode in steps.stage_of:
            traced, layers = steps.layers(mode, stage)
            parts = parts_of(model, traced, layers, output=stage == last)
            mine += [tensor for name, tensor in parts.tensors.items() if name not in traced.constants]
            here = {layer.node for layer in layers}
            for layer in (one for one in layers if one.node.op == "call_module"):
                module = parts.modules[str(layer.node.target)]
                sent = {name for name, source in layer.tied if source not in here}
                held = module.named_parameters(remove_duplicate=False)
                mine += [parameter for name, parameter in held if name not in sent]
                mine += module.buffers()
        found[stage] = list({id(tensor): None for tensor in mine})
    return found


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor; writing them gives the tensor no new version."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
