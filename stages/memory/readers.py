"""Layers of a stage by the parameters that they read, and that only they read.

Only such a parameter may be away while none of these layers runs. What else may look at one keeps it near: a
layer of another stage, the outputs of the model, a layer that returns the parameter itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, fx, nn
from torch.nn import Parameter

from ..tracing.dataflow import Probe
from ..tracing.layers import Layer, Parts, Traced


def readers_of(
    runs: Iterable[tuple[Traced, Sequence[Layer], Parts, Probe]], own: Collection[int]
) -> dict[str, list[Parameter]]:
    """By name of a layer, in running order, the parameters that it reads and that may be away else.

    Args:    runs: of every mode its trace, the layers of this stage, their parts, and what is known of it.
             own: identities of the parameters that this stage owns."""
    found: dict[str, list[Parameter]] = {}
    near: set[int] = set()
    for traced, layers, parts, record in runs:
        near |= _sparse(parts.modules.values())
        read = _reads(traced, layers, parts, record, near)
        for name, parameters in read.items():
            found[name] = _once([*found.get(name, ()), *parameters])
    return {name: [p for p in some if id(p) in own and id(p) not in near] for name, some in found.items()}


def without_resident(readers: Mapping[str, list[Parameter]], num_bytes: int) -> dict[str, list[Parameter]]:
    """The same without parameters that stay: those of whole layers, the smallest first, while they fit.

    Many small ones cost more to move than few large ones of as many bytes."""
    seen: set[int] = set()
    own: list[list[Parameter]] = []
    for parameters in readers.values():
        own.append([p for p in parameters if id(p) not in seen])
        seen |= {id(p) for p in own[-1]}
    stays: set[int] = set()
    for size, first in sorted(
        ((sum(p.nbytes for p in first), first) for first in own), key=lambda one: one[0]
    ):
        if (num_bytes := num_bytes - size) < 0:
            break
        stays |= {id(p) for p in first}
    return {name: [p for p in some if id(p) not in stays] for name, some in readers.items()}


def _reads(
    traced: Traced, layers: Sequence[Layer], parts: Parts, record: Probe, near: set[int]
) -> dict[str, list[Parameter]]:
    """Return what the layers read; ``resident`` grows by what others look at."""
    here = {layer.node for layer in layers}
    read: dict[fx.Node, list[Parameter]] = {layer.node: directly_read(layer, parts) for layer in layers}
    number_of = {layer.node: n for n, layer in enumerate(traced.layers)}
    for node in here:
        for number in record.outputs[node].values:
            value = record.values[number]
            if not value.parameter or value.producer != number_of[node]:
                continue
            if node.op != "get_attr":  # it returns one of those that it reads, and nobody knows which
                near |= {id(p) for p in read[node]}
                continue
            parameter = parts.tensors[str(node.target)]
            assert isinstance(parameter, Parameter)
            for user in value.users:
                if user == len(traced.layers) or traced.layers[user].node not in here:
                    near.add(id(parameter))
                else:
                    read[traced.layers[user].node].append(parameter)
    near |= {id(p) for p in _given(traced.output, parts)}
    near |= {id(p) for layer in layers if layer.name in record.keeping for p in read[layer.node]}
    return {layer.name: _once(read[layer.node]) for layer in layers}


def directly_read(layer: Layer, parts: Parts) -> list[Parameter]:
    """Return the parameters of the layer's module, and those that it is given."""
    node = layer.node
    if node.op == "get_attr":
        return []
    own = list(parts.modules[str(node.target)].parameters()) if node.op == "call_module" else []
    return [*own, *_given(node, parts)]


def _given(node: fx.Node, parts: Parts) -> list[Parameter]:
    named = [parts.tensors.get(str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
    return [tensor for tensor in named if isinstance(tensor, Parameter)]


def _once(parameters: Iterable[Parameter]) -> list[Parameter]:
    return list({id(parameter): parameter for parameter in parameters}.values())


def _sparse(modules: Iterable[nn.Module]) -> set[int]:
    """Parameters whose gradients are sparse, which are added and updated otherwise."""
    within = (m for module in modules for m in module.modules() if getattr(m, "sparse", False) is True)
    return {id(parameter) for module in within for parameter in module.parameters()}


def sharing(tensors: Iterable[Tensor]) -> set[int]:
    """Identities of those that lie in the same memory as another one."""
    places: dict[int, set[int]] = {}
    for tensor in tensors:
        if tensor.layout is torch.strided:
            places.setdefault(tensor.untyped_storage()._cdata, set()).add(id(tensor))
    return {key for keys in places.values() if len(keys) > 1 for key in keys}
