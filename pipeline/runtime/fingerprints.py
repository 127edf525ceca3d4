"""Facts that all ranks must have alike: a name, a value that can be shown, and how to make it the same.

Bits are facts as checksums: a CRC sees every change of up to 32 bits in a row, at the speed of memory. It is
for mistakes, and does not stop an attacker. Functions cannot be compared; their names can."""

import dataclasses
import functools
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ... import __version__
from ...stages.device import CPU, KINDS, autocast_state
from ...stages.safetensors_io import bytes_of
from ...stages.split_inputs import Column
from ...stages.torch_private import keystr, tree_flatten_with_path
from ...stages.tracing.layers import parts_of
from ...stages.tracing.tracer import LayerGraph
from ..optimizer.optimizers import Named, settings_of

BUILD = "install the same build on every rank"
TORCH = "set it alike on every rank, before the Pipeline is made"
ARGUMENTS = "give Pipeline the same arguments on every rank"
MODEL = "make the same model on every rank"
WEIGHTS = "call torch.manual_seed with one number on every rank before the model is made, or load one file"
BATCHES = "give every rank the same batches in the same order, shuffled by a generator of one seed"
STATE = "load the same state on every rank"


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """``what`` is ``value``; where ranks differ in it, ``remedy`` says what to do. ``among``: the kind of
    device of this rank, where others may well differ in it, or what of a batch it reads; "" for what all have
    alike."""

    what: str
    value: str
    remedy: str
    among: str = ""


def of_process(device: torch.device = CPU) -> list[Fact]:
    """Facts that decide the bits of a layer on ``device`` beside its weights: torch's build and settings."""
    version, _, variant = torch.__version__.partition("+")
    backends, commit = torch.backends, str(torch.version.git_version)[:8]
    precisions = {
        "matrix products": backends,
        "CUDA matrix products": backends.cuda.matmul,
        "cuDNN convolutions": backends.cudnn.conv,  # type: ignore[attr-defined]
        "oneDNN matrix products": backends.mkldnn.matmul,  # type: ignore[attr-defined]
        "oneDNN convolutions": backends.mkldnn.conv,  # type: ignore[attr-defined]
        "oneDNN recurrent layers": backends.mkldnn.rnn,  # type: ignore[attr-defined]
    }
    settings = {
        "number of threads of torch": torch.get_num_threads(),
        "deterministic-algorithms flag": torch.are_deterministic_algorithms_enabled(),
        "default dtype": torch.get_default_dtype(),
        **{f"precision for float32 of {name}": kind.fp32_precision for name, kind in precisions.items()},
        "oneDNN flag": backends.mkldnn.enabled,  # type: ignore[attr-defined]
        "flash-attention flag": backends.cuda.flash_sdp_enabled(),
        "flush of denormal numbers": float(torch.tensor(1e-40, dtype=torch.float32) * 1) == 0.0,
        "autocast flag": autocast_state(device)[0],
    }
    return [
        Fact("the version of penstock", __version__, BUILD),
        Fact("the build of torch", f"{version} ({commit})", BUILD),
        Fact("the variant of the build of torch", variant, BUILD, among=device.type),
        Fact("the default device", torch.get_default_device().type, TORCH, among=device.type),
        Fact("the byte order", sys.byteorder, BUILD),
        *(Fact(f"the {name}", str(value), TORCH) for name, value in settings.items()),
    ]


def of_pipeline(
    model: nn.Module,
    optimizer: Callable[[Named], Optimizer],
    scheduler: Callable[[Optimizer], LRScheduler] | None,
    rest: Mapping[str, Any],
    device: torch.device,
) -> list[Fact]:
    """The process, and what its Pipeline was given but for the plan; ``rest`` by the names of arguments.

    The optimizer is made of all parameters: its settings may depend on names, or on a parameter itself."""
    facts = [_argument(name, _shown(value)) for name, value in rest.items()]
    updates = {"scheduler": _shown(scheduler)}
    try:
        made = optimizer(list(model.named_parameters()))
        updates["optimizer"] = f"{type(made).__qualname__}{_shown(_plain(made) or '')}"
        owner = {id(parameter): name for name, parameter in model.named_parameters()}
        for number, group in enumerate(made.param_groups):
            settings = settings_of(group).items()
            updates |= {f"optimizer, {k} of its group {number}": _shown(v) for k, v in settings}
            updates |= {f"optimizer, the group of {owner.get(id(p))}": str(number) for p in group["params"]}
    except Exception as error:  # each stage's own is asked for later, and refused with its reason
        updates["optimizer"] = f"one that cannot be made of all parameters ({type(error).__name__}: {error})"
    return [*of_process(device), *facts, *_of_model(model), *(_argument(*item) for item in updates.items())]


def of_scheduler(scheduler: LRScheduler) -> list[Fact]:
    """The scheduler that the argument of a Pipeline made."""
    return [_argument("scheduler", _shown(scheduler))]


def _argument(name: str, value: str) -> Fact:
    return Fact(f"the argument {name}", value, ARGUMENTS)


def _of_model(model: nn.Module) -> list[Fact]:
    """Modules with their modes, then parameters and buffers by name, and last all bits."""
    modes = {path: "train" if module.training else "eval" for path, module in model.named_modules()}
    facts = [
        Fact(f"the module {path or 'itself'}", f"{type(module).__qualname__} in {modes[path]} mode", MODEL)
        for path, module in model.named_modules()
    ]
    first: dict[int, str] = {}
    kinds = {
        "parameter": model.named_parameters(remove_duplicate=False),
        "buffer": model.named_buffers(remove_duplicate=False),
    }
    bits = []
    for kind, pairs in kinds.items():
        for name, tensor in pairs:
            if (known := first.setdefault(id(tensor), name)) != name:
                facts.append(Fact(f"the {kind} {name}", f"that of {known}", MODEL))
                continue
            trained = "" if kind == "buffer" else ", trained" if tensor.requires_grad else ", frozen"
            facts.append(Fact(f"the {kind} {name}", _form(tensor) + trained, MODEL))
            bits.append(Fact(f"the checksum of the {kind} {name}", _checksum(tensor), WEIGHTS))
    return facts + bits


def of_layers(graph: LayerGraph) -> list[Fact]:
    """Facts of the layers in order: functions with the numbers baked in, modules with their settings."""
    facts, model_copy = [], graph.model_copy
    known = {n for n, _ in (*model_copy.named_parameters(), *model_copy.named_buffers())}
    for mode, traced in (("train", graph.train), ("eval", graph.eval)):
        parts = parts_of(model_copy, traced)
        for layer in traced.layers:
            value = _node(layer.node)
            if layer.node.op == "call_module":
                inner = parts.modules[str(layer.node.target)].named_modules()
                value += "".join(f" {path}{_shown(_plain(module))}" for path, module in inner)
            facts.append(Fact(f"the layer {layer.name} in {mode} mode", value, MODEL))
        kind = traced.recorded.type  # which computed what stands in the tensors
        facts += [
            Fact(f"the tensor {name} in {mode} mode", _shown(tensor), MODEL, among=kind)
            for name, tensor in parts.tensors.items()
            if name not in known
        ]
        facts.append(Fact(f"the output in {mode} mode", _node(traced.output), MODEL))
    return facts


def of_batch(inputs: Sequence[Column], names: Iterable[str], targets: Any) -> list[Fact]:
    """The shapes of a batch, and its bits."""
    given = list[tuple[str, Any]]()
    for name, column in zip(names, inputs, strict=True):
        if isinstance(column, torch.Tensor):
            given.append((f"input {name}", column))
        else:
            given += [(f"input {name} of micro-batch {i}", part) for i, part in enumerate(column)]
    given += [(f"targets{keystr(path)}", leaf) for path, leaf in tree_flatten_with_path(targets)[0]]
    facts, sums = [], []
    for what, item in given:
        is_tensor = isinstance(item, torch.Tensor)
        facts.append(Fact(f"the {what} of the batch", _form(item) if is_tensor else _shown(item), BATCHES))
        if is_tensor and not item.is_meta:
            name = f"the checksum of the {what} of the batch"
            sums.append(Fact(name, _checksum(item), BATCHES, among=f"reads {what}"))
    return facts + sums


def of_state(state: Any) -> list[Fact]:
    """Facts of a state, tensors as checksums."""
    leaves, _ = tree_flatten_with_path(state)
    facts = [Fact(f"the state{keystr(path)}", _shown(leaf), STATE) for path, leaf in leaves]
    return sorted(facts, key=lambda fact: fact.what)  # whatever the order in which it was written down


def _form(tensor: torch.Tensor) -> str:
    if tensor.layout != torch.strided:
        return f"{tensor.dtype} {tuple(tensor.shape)}, {tensor.layout}"
    return f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"


def _checksum(tensor: torch.Tensor) -> str:
    """Checksum of the elements in their order; those of the meta device have no bits."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return "none"
    return f"{zlib.crc32(bytes_of(tensor)):08x}"


def _node(node: fx.Node) -> str:
    """A node of a trace, the same text in every process."""
    target = node.target if isinstance(node.target, str) else _shown(node.target)
    seen = f" was {node.meta['expect']}" if "expect" in node.meta else ""
    return f"{target}{_shown(node.args)}{_shown(node.kwargs) if node.kwargs else ''}{seen}"


def _plain(held: object) -> dict[str, Any]:
    """The settings that an object keeps in attributes: plain values and functions."""
    kinds = bool | int | float | complex | str | torch.dtype | torch.Tensor | tuple | list | None
    return {
        name: value
        for name, value in vars(held).items()
        if name[0] != "_" and name not in ("training", "param_groups")
        if isinstance(value, kinds) or callable(value)
    }


def _shown(value: Any) -> str:
    """A value as text that is the same in every process; of an object its class and its settings."""
    if isinstance(value, torch.Tensor):
        return f"{_form(value)}, checksum {_checksum(value)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_shown(item)}" for name, item in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_shown, value)) + ")"
    if isinstance(value, functools.partial):
        return f"{_shown(value.func)}{_shown(value.args)}{_shown(value.keywords)}"
    if isinstance(value, LRScheduler | torch.amp.GradScaler):
        return f"{type(value).__qualname__}{_shown(value.state_dict())}"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(_shown, value))) + "}"  # their own order differs, too
    if isinstance(value, torch.device) and value.type in KINDS:
        return "where ranks compute"  # each on its own
    if callable(value) and not isinstance(value, torch.device):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # addresses differ from process to process
