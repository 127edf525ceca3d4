"""Tensors of a model that share memory: which they are, and where they must stay together.

``head.weight.data = emb.weight.data`` makes two parameters of one memory. What an update of one does to the
other is the same in the plain loop only where one optimizer has both: on one stage; another rank would not
see it at all. Slices that do not overlap, as those of one flat buffer, are as good as separate."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from ...compression.errors import PlanError
from ...compression.geometry import Geometry, geometry
from ..torch_private import memory_id
from .layers import Traced, parts_of, tensors_read
from .object_snapshot import held_tensors, tensors


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpan:
    """The bytes of a tensor: between ``start`` and ``stop`` in ``memory``, as its geometry says."""

    name: str
    memory: tuple[str, int]
    start: int
    stop: int
    geometry: Geometry

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> MemorySpan | None:
        """None for a tensor without memory of its own."""
        if nn.parameter.is_lazy(tensor) or tensor.layout is not torch.strided or not tensor.numel():
            return None
        found = geometry(tuple(tensor.shape), tensor.stride(), tensor.itemsize)
        if tensor.is_meta:
            start, home = int(tensor.storage_offset()) * tensor.itemsize, memory_id(tensor)
        else:
            start, home = tensor.data_ptr(), 0
        stop = start + found.span * tensor.itemsize
        return cls(name=name, memory=(str(tensor.device), home), start=start, stop=stop, geometry=found)

    def meets(self, other: MemorySpan) -> bool:
        """Return whether some byte is in both."""
        if self.memory != other.memory or self.stop <= other.start or other.stop <= self.start:
            return False
        if self.geometry.order == other.geometry.order == "dense":
            return True
        low, high = min(self.start, other.start), max(self.stop, other.stop)
        return bool((self._marks(low, high) & other._marks(low, high)).any())

    def _marks(self, low: int, high: int) -> torch.Tensor:
        """Mark the bytes from ``low`` to ``high`` that it has: columns of a matrix lie between each other."""
        marks, item = torch.zeros(high - low, dtype=torch.bool), self.geometry.item_bytes
        sizes, strides = zip(*self.geometry.walk, strict=True) if self.geometry.walk else ((), ())
        marks.as_strided((*sizes, item), (*(s * item for s in strides), 1), self.start - low).fill_(True)
        return marks


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that can be written to: every place of its memory once, where its elements share some."""
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return tensor
    found = geometry(tuple(tensor.shape), tensor.stride(), tensor.itemsize)
    apart = found.order != "overlapping" and found.num_stored == found.num_elements
    return tensor if apart else tensor.as_strided((found.span,), (1,))


def overlapping(named: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """The names of tensors that lie in each other's memory, group by group."""
    laid = [place for name, tensor in named.items() if (place := MemorySpan.of(name, tensor)) is not None]
    laid.sort(key=lambda place: (place.memory, place.start))
    groups: list[list[MemorySpan]] = []
    ends: dict[tuple[str, int], int] = {}
    for place in laid:
        # Most tensors begin where none has gone on: they meet nothing that came before.
        touched = place.start < ends.get(place.memory, 0)
        met = [group for group in groups if touched and any(place.meets(other) for other in group)]
        groups = [group for group in groups if group not in met] if met else groups
        groups.append([*itertools.chain(*met), place])
        ends[place.memory] = max(ends.get(place.memory, 0), place.stop)
    order = {name: number for number, name in enumerate(named)}
    return [tuple(sorted((p.name for p in g), key=order.__getitem__)) for g in groups if len(g) > 1]


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

    An optimizer writes where a trained parameter is first used.

    Args:    written: the buffers that a forward writes to.
             unread: the layers that stand for the readers of a registered tensor that none reads.
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


def refuse_cuts(groups: Groups, refused: dict[int, str]) -> None:
    """Note for every cut that would part a group why it is refused, where nothing else has refused it."""
    for group, layers in groups.items():
        for cut in range(min(layers, default=0), max(layers, default=0)):
            refused.setdefault(cut, shared_memory_reason(group))


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
