"""What a recorded run gathers: values by the identity of their objects, who reads and who writes them."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import TreeSpec, tree_flatten

from .layers import Layer, Parts, is_local


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What a layer returned: the values of its leaves and the structure around them.

    ``alone``: the value that it is by itself, None where there is a structure."""

    values: tuple[int, ...]
    spec: TreeSpec
    alone: int | None


Leads = Mapping[int, Collection[int]]  # from values that a layer made to those that it read


class ProbeRecorder:
    """Gathers values by object identity; keeps every object, so that no identity is used twice."""

    def __init__(self, generators: Sequence[torch.Generator] = ()) -> None:
        self.generators = generators
        self.objects: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.names: list[str] = []
        self.producers: list[int] = []
        self.users: list[set[int]] = []
        self.outputs: dict[fx.Node, Outputs] = {}
        self.random: set[str] = set()
        self.own: set[str] = set()  # layers that run code of a person's
        self.keeping: set[str] = set()  # those whose backward runs such code
        self.accesses: dict[int, tuple[str, set[int]]] = {}
        self.written: set[int] = set()
        self.writes: dict[int, list[int]] = {}
        self.leads: dict[int, Leads] = {}
        self.uncounted: dict[int, str] = {}  # by memory, a layer that wrote to it so
        self.keepers: dict[int, str] = {}  # by memory, a layer that keeps it for its backward
        self.unseen: dict[int, int] = {}  # by value, the last layer that wrote to it uncounted
        self.turned: dict[int, int] = {}  # by value, the last layer that made it ask for a gradient, or not
        self.on: dict[int, list[torch.Tensor]] = {}
        self.kept: list[torch.UntypedStorage] = []  # else one that is exchanged gives its number to another

    def add(self, node: fx.Node, index: int, result: Any) -> None:
        """Note what the layer ``index``, which is ``node``, returned: a known object is a known value."""
        leaves, spec = tree_flatten(result)
        values = []
        for k, leaf in enumerate(leaves):
            known = self.numbers.get(id(leaf)) if isinstance(leaf, torch.Tensor) else None
            if known is None:
                known = len(self.objects)
                self.objects.append(leaf)
                self.names.append(node.name if len(leaves) == 1 else f"{node.name}.{k}")
                self.producers.append(index)
                self.users.append(set())
                if isinstance(leaf, torch.Tensor):
                    self.numbers[id(leaf)] = known
                    if leaf.layout is torch.strided:
                        self.on.setdefault(leaf.untyped_storage()._cdata, []).append(leaf)
            values.append(known)
        self.outputs[node] = Outputs(
            values=tuple(values), spec=spec, alone=values[0] if spec.is_leaf() else None
        )

    def reads(self, node: fx.Node, extra: Sequence[fx.Node] = ()) -> Iterator[int]:
        """The values that ``node`` reads: of a tuple that is indexed, only what is picked."""
        for source in (*node.all_input_nodes, *extra):
            if is_local(source):
                continue
            outputs = self.outputs[source]
            picks = node.args[1] if node.target is operator.getitem and source is node.args[0] else None
            flat = outputs.spec.num_children == outputs.spec.num_leaves > 0
            if isinstance(picks, int) and flat:
                yield outputs.values[picks]
            else:
                yield from outputs.values

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Know tensors of the model by their memory: who writes to a view of one writes to it."""
        for tensor in tensors:
            others = self.on.setdefault(tensor.untyped_storage()._cdata, [])
            if all(tensor is not other for other in others):
                others.append(tensor)

    def beside(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """These tensors, and all that lie in the same memories."""
        found = {id(t): t for t in tensors}
        for t in list(found.values()):
            if t.layout is torch.strided:
                found |= {id(other): other for other in self.on.get(t.untyped_storage()._cdata, ())}
        return list(found.values())

    def writers(self, number: int) -> list[int]:
        """The layers that wrote to the memory of a value, ascending, its producer first."""
        item = self.objects[number]
        writes = self.writes.get(item.untyped_storage()._cdata, []) if isinstance(item, torch.Tensor) else []
        return sorted({self.producers[number], *writes})

    def last_writer(self, number: int, reader: int) -> int:
        """The layer that wrote last to the memory of a value before the layer ``reader`` runs."""
        return max(writer for writer in self.writers(number) if writer < reader)

    def watched(self) -> set[int]:
        """The values whose gradient a hook sees."""
        tensors = {n: t for n, t in enumerate(self.objects) if isinstance(t, torch.Tensor)}
        return {number for number, tensor in tensors.items() if tensor._backward_hooks or tensor.retains_grad}

    def storages(self, numbers: Sequence[int]) -> dict[int, int]:
        """Identity of the tensors' storages (on the meta device all addresses are zero)."""
        return {
            i: t.untyped_storage()._cdata for i in numbers if isinstance(t := self.objects[i], torch.Tensor)
        }


def buffers_at(layer: Layer, parts: Parts) -> dict[str, torch.Tensor]:
    """The buffers and frozen parameters that a layer may write to, by name."""
    found = local_at(layer.node, parts)
    if layer.node.op == "call_module":
        module = parts.modules[str(layer.node.target)]
        frozen = ((name, p) for name, p in module.named_parameters() if not p.requires_grad)
        found |= {f"{layer.node.target}.{name}": part for name, part in (*module.named_buffers(), *frozen)}
    return found


def local_at(node: fx.Node, parts: Parts) -> dict[str, torch.Tensor]:
    """The tensors of the model that a node is given, by name."""
    return {str(n.target): parts.tensors[str(n.target)] for n in node.all_input_nodes if is_local(n)}
