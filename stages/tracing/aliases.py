"""Tensors of a model that share memory: which they are, and where they must stay together.

``head.weight.data = emb.weight.data`` makes two parameters of one memory. What an update of one does to the
other is the same in the plain loop only where one optimizer has both: on one stage; another rank would not
see it at all. Slices that do not overlap, as those of one flat buffer, are as good as separate."""

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import nn

from ...compression.errors import PlanError
from ...compression.geometry import geometry
from ..torch_private import memory_id
from .layers import Traced, parts_of, tensors_read
from .object_snapshot import held_tensors, tensors


def _places(tensor: torch.Tensor) -> Any:
    """An array over the bytes of a tensor, which nobody reads; meta addresses are 0, and numpy takes none."""
    start = tensor.storage_offset() * tensor.itemsize + 64 if tensor.is_meta else tensor.data_ptr()
    strides = tuple(stride * tensor.itemsize for stride in tensor.stride())
    layout = {"shape": tuple(tensor.shape), "strides": strides, "typestr": f"|V{tensor.itemsize}"}
    return numpy.asarray(SimpleNamespace(__array_interface__={"version": 3, "data": (start, True), **layout}))


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that can be written to: every place of its memory once, where its elements share some."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor
    found = geometry(tuple(tensor.shape), tensor.stride(), tensor.itemsize)
    apart = found.order != "overlapping" and found.num_stored == found.num_elements
    return tensor if apart else tensor.as_strided((found.span,), (1,))


def overlapping(named: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """The names of tensors that lie in each other's memory, group by group."""
    spans: list[tuple[tuple[str, int], int, int, str]] = []
    places: dict[str, Any] = {}
    for name, tensor in named.items():
        if tensor.layout is torch.strided and not nn.parameter.is_lazy(tensor) and tensor.numel():
            memory = str(tensor.device), memory_id(tensor) if tensor.is_meta else 0
            places[name] = _places(tensor)
            start, _ = places[name].__array_interface__["data"]
            span = geometry(tuple(tensor.shape), tensor.stride(), tensor.itemsize).span * tensor.itemsize
            spans.append((memory, start, start + span, name))
    edges: list[tuple[str, str]] = []
    before: list[tuple[tuple[str, int], int, int, str]] = []
    for one in sorted(spans):
        before = [other for other in before if other[0] == one[0] and other[2] > one[1]]
        # Columns of a matrix lie between each other, and share nothing.
        shares = (other for *_, other in before if numpy.shares_memory(places[one[3]], places[other]))
        edges += [(other, one[3]) for other in shares]
        before.append(one)
    if not edges:
        return []
    import networkx  # a tenth of a second

    groups = networkx.connected_components(networkx.Graph(edges))
    return [tuple(name for name in named if name in group) for group in groups]


def unregistered_views(model: nn.Module) -> list[str]:
    """The paths of tensors that are not registered and lie in the memory of a trained parameter."""
    everything = tensors(model)
    registered = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    groups = [group for group in overlapping(everything) if _trained(group, everything)]
    return [name for group in groups for name in group if name not in registered]


def in_memory_of(model: nn.Module) -> set[int]:
    """The ids of tensors in the storage of a registered one: its versions are theirs."""
    registered = [*model.parameters(), *model.buffers()]
    storages = {memory_id(t) for t in registered if t.layout is torch.strided}
    return {id(t) for t in tensors(model).values() if t.layout is torch.strided and memory_id(t) in storages}


Groups = Mapping[tuple[str, ...], Collection[int]]


def shared(model: nn.Module, traced: Traced, *, written: Collection[str], unread: Collection[int]) -> Groups:
    """The groups of tensors in each other's memory that something writes to: names -> layers that need them.

    An optimizer writes where a trained parameter is first used, a forward to the buffers ``written``.

    Args:    unread: the layers that stand for the readers of a registered tensor that none reads.
    Raises:  PlanError: a forward writes to the memory of a trained parameter."""
    everything = tensors(model)
    readers = _readers(model, traced)
    registered = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    counted = {n: t for n, t in everything.items() if n in registered or readers.get(id(t))}
    found: dict[tuple[str, ...], set[int]] = {}
    for group in overlapping(counted):
        trained = _trained(group, everything)
        if trained and (both := [name for name in group if name in written]):
            raise PlanError(
                f"a forward writes to {both[0]}, which lies in the memory of the parameter {trained[0]}; "
                f"give {both[0]} memory of its own (clone)"
            )
        if trained or not set(group).isdisjoint(written):
            needed = [sorted(readers.get(id(everything[name]), unread)) for name in group]
            ends = [layers[:1] if n in trained else layers for n, layers in zip(group, needed, strict=True)]
            found[group] = {layer for layers in ends for layer in layers}
    return found


def shared_memory_reason(group: Sequence[str]) -> str:
    """Why a group stays together, and what to do."""
    first, other = group[:2]
    return (
        f"{first} and {other} share memory that is written to, and would stand on both sides; make them one "
        f"parameter ({other} = {first}), compute one from the other in forward, or give it its own (clone)"
    )


def _trained(group: Sequence[str], everything: Mapping[str, torch.Tensor]) -> list[str]:
    return [n for n in group if everything[n].requires_grad and isinstance(everything[n], nn.Parameter)]


def _readers(model: nn.Module, traced: Traced) -> dict[int, set[int]]:
    """For every tensor of ``model`` (by identity) the layers that read it; the output counts as one more."""
    found: dict[int, set[int]] = {}
    parts = parts_of(model, traced)
    inside = {path: held_tensors(module) for path, module in parts.modules.items()}
    for index, node in enumerate([*(layer.node for layer in traced.layers), traced.output]):
        held = inside[str(node.target)] if node.op == "call_module" else []
        for tensor in (*held, *(tensor for _, tensor in tensors_read(node, parts))):
            found.setdefault(id(tensor), set()).add(index)
    return found
