"""What a traced network is made of: its layers, the parts of the model they name, how one is run.

Probe, profile and stage all run layers by the same function, so what was proven on a copy holds for the real
run."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_arg


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One node of the trace; ``module`` is the dotted path it was traced in.

    ``lifted``: for every tied parameter of a module, (its name inside the module, the get_attr layer that
    reads it). ``holds``: whether it needs parameters or buffers that only its own stage has."""

    node: fx.Node
    module: str
    lifted: tuple[tuple[str, fx.Node], ...] = ()
    holds: bool = False

    @property
    def name(self) -> str:
        """The node's name under a default torch.fx tracer: it stands in tables, in JSON and in ``cuts``."""
        return self.node.name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """The trace of one mode (train or eval): input nodes, layers in running order, the output node.

    ``constants`` are the tensors that tracing found in forward, by the name that torch.fx gave them;
    ``buffers`` the names of registered buffers that layers read by themselves: no other tensor of the model
    may be written to."""

    inputs: tuple[fx.Node, ...]
    layers: tuple[Layer, ...]
    output: fx.Node
    constants: Mapping[str, torch.Tensor]
    buffers: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """Modules and tensors that some layers name, by dotted path; nothing else of the model is kept."""

    modules: dict[str, nn.Module]
    tensors: dict[str, torch.Tensor]


def parts_of(
    root: nn.Module, traced: Traced, layers: Iterable[Layer] | None = None, *, output: bool = True
) -> Parts:
    """The parts of ``root`` that ``layers`` (default: all) use, and those that the ``output`` returns."""
    modules: dict[str, nn.Module] = {}
    tensors: dict[str, torch.Tensor] = {}
    nodes = [layer.node for layer in (traced.layers if layers is None else layers)]
    for node in nodes:
        if node.op == "call_module":
            modules[str(node.target)] = root.get_submodule(str(node.target))
    readers = [*nodes, traced.output] if output else nodes
    for node in (*nodes, *(source for reader in readers for source in reader.all_input_nodes)):
        if node.op == "get_attr" and (is_local(node) or node in nodes):
            name = str(node.target)
            tensors[name] = (
                traced.constants[name] if name in traced.constants else operator.attrgetter(name)(root)
            )
    return Parts(modules, tensors)


def casting(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Autocast to ``dtype`` without its cache of cast weights, which depends on what shares a stage; None: no
    cast."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype, cache_enabled=False)


def is_local(node: fx.Node) -> bool:
    """Whether a node reads a buffer, a constant or a frozen parameter: read where used, never sent."""
    return "local" in node.meta


def run_layer(
    layer: Layer, env: Mapping[fx.Node, Any], parts: Parts, tied: Mapping[fx.Node, torch.Tensor] | None = None
) -> Any:
    """Run one layer on the results in ``env``; ``tied``: parameters that came from another stage."""
    node = layer.node
    if node.op == "get_attr":
        return parts.tensors[str(node.target)]

    def look(argument: fx.Node) -> Any:
        return parts.tensors[str(argument.target)] if is_local(argument) else env[argument]

    args: Any = map_arg(node.args, look)
    kwargs: Any = map_arg(node.kwargs, look)
    if node.op == "call_function":
        return node.target(*args, **kwargs)  # type: ignore[operator]
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    module = parts.modules[str(node.target)]
    foreign = {name: tied[source] for name, source in layer.lifted if tied and source in tied}
    return torch.func.functional_call(module, foreign, args, kwargs) if foreign else module(*args, **kwargs)


def run_output(traced: Traced, env: Mapping[fx.Node, Any], parts: Parts) -> Any:
    """What the model returns, put together from the results in ``env``."""
    return map_arg(
        traced.output.args[0], lambda node: parts.tensors[str(node.target)] if is_local(node) else env[node]
    )


def run_all(traced: Traced, parts: Parts, inputs: Sequence[torch.Tensor]) -> Any:
    """The whole traced network, layer by layer."""
    env: dict[fx.Node, Any] = dict(zip(traced.inputs, inputs, strict=True))
    for layer in traced.layers:
        env[layer.node] = run_layer(layer, env, parts)
    return run_output(traced, env, parts)
