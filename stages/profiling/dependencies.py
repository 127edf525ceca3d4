"""The graph of dependencies of a network: which layer reads and makes which data, forward and backward.

A view of LayerGraph, its probe and its profile, as plain data: a picture draws it, a program may read it.
There are layer and data vertices; edges from input to layer to output (forward), from output to layer to
input and from what a layer saved to the layer (backward), and from layer to layer (compute)."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ..files import save_json
from ..tracing.layers import parts_of, tensors_read
from ..tracing.tracer import LayerGraph
from .network_profile import Profile

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"
KINDS = ("value", "saved", "parameter", "buffer", "gradient", "version", "optimizer")
"""Data vertices: what passes between layers; what a layer keeps for itself; and what belongs to parameters. A
gradient is a value's or a parameter's; older versions of a parameter are one vertex, and so is its state."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """A data vertex. ``layer``: who made it, or is the first to use it; -1 for an input of the model."""

    name: str
    kind: str
    layer: int
    num_bytes: int


class Edge(NamedTuple):
    """A layer that reads a datum (``enters``: the datum leads to the layer) or makes it."""

    way: str
    layer: int
    data: int
    enters: bool


class Compute(NamedTuple):
    """A layer that ``target`` waits for."""

    way: str
    source: int
    target: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """The vertices by number, and the edges between them; ``modules``: where each layer ran."""

    layers: tuple[str, ...]
    modules: tuple[str, ...]
    data: tuple[Data, ...]
    edges: tuple[Edge, ...]
    compute: tuple[Compute, ...]

    def to_json(self) -> dict[str, Any]:
        """The graph as JSON data; an edge is [way, from, to], a vertex L and a layer's number, or D and that
        of a datum."""
        ends = [(edge.way, f"D{edge.data}", f"L{edge.layer}", edge.enters) for edge in self.edges]
        return {
            "penstock_graph": 1,
            "layers": [{"name": n, "module": m} for n, m in zip(self.layers, self.modules, strict=True)],
            "data": [dataclasses.asdict(one) for one in self.data],
            "data_edges": [[way, *((data, at) if enters else (at, data))] for way, data, at, enters in ends],
            "compute_edges": [[way, f"L{source}", f"L{target}"] for way, source, target in self.compute],
        }

    def save(self, path: str | Path) -> None:
        """Write the graph as JSON, whole or not at all, else ConfigError."""
        save_json(path, self.to_json())


def dependencies(
    graph: LayerGraph, profile: Profile, *, optimizer_state: float = 0.0, old_versions: Sequence[int] = ()
) -> Dependencies:
    """The dependencies of what ``graph`` recorded and ``profile`` measured, as it trains.

    Args:    optimizer_state: bytes that the optimizer keeps for each of a parameter's.
             old_versions: for each layer, the versions of its parameters beside the newest; (): none."""
    builder = _Builder(graph, profile)
    builder.add_values()
    builder.add_saved()
    builder.add_weights(optimizer_state, old_versions or [0] * len(profile.layers))
    return Dependencies(
        layers=tuple(layer.name for layer in profile.layers),
        modules=tuple(layer.module for layer in profile.layers),
        data=tuple(builder.data),
        edges=tuple(dict.fromkeys(builder.edges)),
        compute=tuple(sorted(set(builder.compute()))),
    )


class _Builder:
    def __init__(self, graph: LayerGraph, profile: Profile) -> None:
        self.graph, self.profile = graph, profile
        self.values = graph.train_probe.values
        self.has_gradient = [value.contributions > 0 for value in profile.values]
        self.users = [[u for u in value.users if u < len(profile.layers)] for value in self.values]
        self.writers = [[w for w, _ in value.writers if w >= 0] for value in self.values]
        pairs = zip(self.values, self.has_gradient, strict=True)
        self.differentiable = {writer for value, has in pairs if has for writer, _ in value.writers}
        self.data: list[Data] = []
        self.edges: list[Edge] = []

    def add(self, name: str, kind: str, layer: int, num_bytes: int) -> int:
        self.data.append(Data(name=name, kind=kind, layer=layer, num_bytes=num_bytes))
        return len(self.data) - 1

    def add_values(self) -> None:
        """Values have the numbers of the probe; the gradients of those that have one come behind them."""
        for value in self.values:
            self.add(value.name, "parameter" if value.parameter else "value", value.producer, value.num_bytes)
        for number, value in enumerate(self.values):
            writers, users = self.writers[number], self.users[number]
            self.edges += [Edge(FORWARD, layer, number, False) for layer in writers]
            self.edges += [Edge(FORWARD, layer, number, True) for layer in users]
            if self.has_gradient[number]:
                gradient = self.add(f"gradient of {value.name}", "gradient", value.producer, value.num_bytes)
                self.edges += [Edge(BACKWARD, layer, gradient, True) for layer in writers]
                trained = [layer for layer in users if layer in self.differentiable]
                self.edges += [Edge(BACKWARD, layer, gradient, False) for layer in trained]

    def add_saved(self) -> None:
        """A value that was saved leads to the backward of its savers; what is no value has its own vertex."""
        numbers = {value.name: number for number, value in enumerate(self.values)}
        for one in self.profile.intermediates:
            number = numbers.get(one.value)
            if number is None:
                name = f"{one.kind} {one.order} of {self.profile.layers[one.layer].name}"
                number = self.add(name, "saved", one.maker, one.num_bytes)
                self.edges.append(Edge(FORWARD, max(one.maker, 0), number, False))
            self.edges += [Edge(BACKWARD, layer, number, True) for layer in one.savers]

    def add_weights(self, optimizer_state: float, old_versions: Sequence[int]) -> None:
        model, known = self.graph.model_copy, dict[str, dict[str, int]]()
        names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
        parts = parts_of(model, self.graph.train)
        for index, layer in enumerate(self.graph.train.layers):
            kept = {"optimizer": optimizer_state, "version": old_versions[index]}
            if layer.node.op == "get_attr":  # a tied parameter is a value, and so is its gradient
                for number in self.graph.train_probe.outputs[layer.node].values:
                    name = f"gradient of {self.values[number].name}"
                    gradient = next((n for n, one in enumerate(self.data) if one.name == name), None)
                    if self.values[number].parameter and gradient is not None:
                        self.update(index, number, gradient, kept)
                continue
            tied = {f"{layer.node.target}.{name}" for name, _ in layer.tied}  # these come to it as values
            saved = self.profile.backward_reads.get(index, ())
            for path, tensor in tensors_read(layer.node, parts):
                name = names.get(id(tensor))
                if path in tied or name is None:  # a constant of the run
                    continue
                if name not in known:
                    is_parameter = isinstance(tensor, nn.Parameter)
                    number = self.add(name, "parameter" if is_parameter else "buffer", index, tensor.nbytes)
                    known[name] = {"data": number}
                    if is_parameter and tensor.requires_grad and index in self.differentiable:
                        gradient = self.add(f"gradient of {name}", "gradient", index, tensor.nbytes)
                        known[name] |= {"gradient": gradient, **self.update(index, number, gradient, kept)}
                found = known[name]
                self.edges.append(Edge(FORWARD, index, found["data"], True))
                if name in saved:
                    self.edges.append(Edge(BACKWARD, index, found.get("version", found["data"]), True))
                if "gradient" in found:
                    self.edges.append(Edge(BACKWARD, index, found["gradient"], False))

    def update(self, layer: int, parameter: int, gradient: int, kept: Mapping[str, float]) -> dict[str, int]:
        """Add the update of a parameter, and what it keeps, as so many times the parameter's bytes."""
        titles = {"optimizer": "optimizer state of", "version": "old versions of"}
        name, num_bytes = self.data[parameter].name, self.data[parameter].num_bytes
        added = {
            kind: self.add(f"{titles[kind]} {name}", kind, layer, math.ceil(times * num_bytes))
            for kind, times in kept.items()
            if times
        }
        read = [gradient, *(number for kind, number in added.items() if kind == "optimizer")]
        self.edges += [Edge(UPDATE, layer, number, True) for number in read]
        self.edges += [Edge(UPDATE, layer, number, False) for number in (parameter, *added.values())]
        return added

    def compute(self) -> Iterator[Compute]:
        """Forward from who wrote a value last to who reads it, backward where a gradient comes back."""
        for number, users in enumerate(self.users):
            for user in users:
                source = max((w for w in self.writers[number] if w < user), default=-1)
                if source >= 0:
                    yield Compute(FORWARD, source, user)
                    if self.has_gradient[number] and user in self.differentiable:
                        yield Compute(BACKWARD, user, source)
