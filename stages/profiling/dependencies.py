"""The graph of dependencies of a network: which layer reads and makes which data, forward and backward.

A view of LayerGraph, its probe and its profile, as plain data: a picture draws it, a program may read it.
There are layer and data vertices; edges from input to layer to output (forward), from output to layer to
input and from what a layer saved to the layer (backward), and from layer to layer (compute)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..files import save_json
from ..tracing.layers import Layer, Parts, parts_of, tensors_read
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

    @property
    def shown(self) -> list[str]:
        """The edge as [way, from, to]."""
        ends = [f"D{self.data}", f"L{self.layer}"]
        return [self.way, *(ends if self.enters else ends[::-1])]


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

    def of(self, layer: int, way: str, *, enters: bool) -> tuple[int, ...]:
        """Numbers of the data that a layer reads, or makes, on that way."""
        return tuple(e.data for e in self.edges if (e.layer, e.way, e.enters) == (layer, way, enters))

    def to_json(self) -> dict[str, Any]:
        """The graph as JSON data; an edge is [way, from, to], a vertex L and a layer's number, or D and that
        of a datum."""
        return {
            "penstock_graph": 1,
            "layers": [{"name": n, "module": m} for n, m in zip(self.layers, self.modules, strict=True)],
            "data": [dataclasses.asdict(one) for one in self.data],
            "data_edges": [edge.shown for edge in self.edges],
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
    return _Builder(graph, profile).built(optimizer_state, old_versions or [0] * len(profile.layers))


class _Builder:
    def __init__(self, graph: LayerGraph, profile: Profile) -> None:
        self.graph, self.profile = graph, profile
        self.values = graph.train_probe.values
        self.has_gradient = [value.contributions > 0 for value in profile.values]
        self.differentiable = {
            writer
            for value, has in zip(self.values, self.has_gradient, strict=True)
            for writer, _ in value.writers
            if has
        }
        self.data: list[Data] = []
        self.edges: list[Edge] = []

    def built(self, optimizer_state: float, old_versions: Sequence[int]) -> Dependencies:
        self._values()
        self._saved()
        self._weights(optimizer_state, old_versions)
        layers = self.profile.layers
        return Dependencies(
            layers=tuple(layer.name for layer in layers),
            modules=tuple(layer.module for layer in layers),
            data=tuple(self.data),
            edges=tuple(dict.fromkeys(self.edges)),
            compute=tuple(sorted(set(self._compute()))),
        )

    def _add(self, name: str, kind: str, layer: int, num_bytes: int) -> int:
        self.data.append(Data(name=name, kind=kind, layer=layer, num_bytes=num_bytes))
        return len(self.data) - 1

    def _users(self, number: int) -> list[int]:
        return [user for user in self.values[number].users if user < len(self.profile.layers)]

    def _writers(self, number: int) -> list[int]:
        return [writer for writer, _ in self.values[number].writers if writer >= 0]

    def _values(self) -> None:
        """Values have the numbers of the probe; the gradients of those that have one come behind them."""
        for value in self.values:
            kind = "parameter" if value.parameter else "value"
            self._add(value.name, kind, value.producer, value.num_bytes)
        for number, value in enumerate(self.values):
            self.edges += [Edge(FORWARD, layer, number, False) for layer in self._writers(number)]
            self.edges += [Edge(FORWARD, layer, number, True) for layer in self._users(number)]
            if self.has_gradient[number]:
                gradient = self._add(f"gradient of {value.name}", "gradient", value.producer, value.num_bytes)
                self.edges += [Edge(BACKWARD, layer, gradient, True) for layer in self._writers(number)]
                users = [user for user in self._users(number) if user in self.differentiable]
                self.edges += [Edge(BACKWARD, layer, gradient, False) for layer in users]

    def _saved(self) -> None:
        """A value that was saved leads to the backward of its savers; what is no value has its own vertex."""
        numbers = {value.name: number for number, value in enumerate(self.values)}
        for one in self.profile.intermediates:
            number = numbers.get(one.value)
            if number is None:
                name = f"{one.kind} {one.order} of {self.profile.layers[one.layer].name}"
                number = self._add(name, "saved", one.maker, one.num_bytes)
                self.edges.append(Edge(FORWARD, max(one.maker, 0), number, False))
            self.edges += [Edge(BACKWARD, layer, number, True) for layer in one.savers]

    def _weights(self, optimizer_state: float, old_versions: Sequence[int]) -> None:
        names = {id(t): name for name, t in reversed([*self.graph.model_copy.named_parameters()])}
        names |= {id(t): name for name, t in reversed([*self.graph.model_copy.named_buffers()])}
        parts = parts_of(self.graph.model_copy, self.graph.train)
        known: dict[str, dict[str, int]] = {}
        for index, layer in enumerate(self.graph.train.layers):
            if layer.node.op == "get_attr":
                self._tied(index, layer, optimizer_state, old_versions[index])
            read = self.profile.backward_reads.get(index, ())
            for kind, tensor in _own(layer, parts):
                name = names.get(id(tensor), "")
                if not name:  # a constant of the run
                    continue
                if name not in known:
                    trained = kind == "parameter" and tensor.requires_grad and index in self.differentiable
                    known[name] = {kind: self._add(name, kind, index, tensor.nbytes)}
                    if trained:
                        gradient = self._add(f"gradient of {name}", "gradient", index, tensor.nbytes)
                        known[name] = {"parameter": known[name]["parameter"], "gradient": gradient}
                        kept = {"optimizer": optimizer_state, "version": old_versions[index]}
                        known[name] |= self._updated(index, known[name], kept)
                self._use(index, known[name], reads=name in read)

    def _tied(self, layer: int, found: Layer, optimizer_state: float, old_versions: int) -> None:
        """A tied parameter is a value, and so is its gradient."""
        for number in self.graph.train_probe.outputs[found.node].values:
            name = f"gradient of {self.values[number].name}"
            gradient = next((n for n, one in enumerate(self.data) if one.name == name), None)
            if self.values[number].parameter and gradient is not None:
                self._updated(
                    layer,
                    {"parameter": number, "gradient": gradient},
                    {"optimizer": optimizer_state, "version": old_versions},
                )

    def _updated(self, layer: int, found: Mapping[str, int], kept: Mapping[str, float]) -> dict[str, int]:
        """Add what an update of a parameter keeps, as far as it does: times its bytes; and the update."""
        parameter = self.data[found["parameter"]]
        titles = {"optimizer": "optimizer state", "version": "old versions"}
        made = {
            kind: self._add(
                f"{titles[kind]} of {parameter.name}", kind, layer, math.ceil(times * parameter.num_bytes)
            )
            for kind, times in kept.items()
            if times
        }
        entering = [found["gradient"], *(made[kind] for kind in made if kind == "optimizer")]
        self.edges += [Edge(UPDATE, layer, number, True) for number in entering]
        self.edges += [Edge(UPDATE, layer, number, False) for number in (found["parameter"], *made.values())]
        return made

    def _use(self, layer: int, found: Mapping[str, int], *, reads: bool) -> None:
        """Add what a layer's forward and backward do with a parameter or buffer; ``reads``: it was saved."""
        kind = "buffer" if "buffer" in found else "parameter"
        self.edges.append(Edge(FORWARD, layer, found[kind], True))
        if reads:
            self.edges.append(Edge(BACKWARD, layer, found.get("version", found[kind]), True))
        if "gradient" in found:
            self.edges.append(Edge(BACKWARD, layer, found["gradient"], False))

    def _compute(self) -> Iterator[Compute]:
        """From layer to layer: forward from who wrote a value last to who reads it, backward where a gradient
        comes back."""
        for number in range(len(self.values)):
            for user in self._users(number):
                source = max((w for w in self._writers(number) if w < user), default=-1)
                if source < 0:
                    continue
                yield Compute(FORWARD, source, user)
                if self.has_gradient[number] and user in self.differentiable:
                    yield Compute(BACKWARD, user, source)


def _own(layer: Layer, parts: Parts) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers that a layer itself reads; a tied parameter comes to it as a value."""
    if layer.node.op == "get_attr":
        return
    tied = {f"{layer.node.target}.{name}" for name, _ in layer.tied}
    for name, tensor in tensors_read(layer.node, parts):
        if name not in tied:
            yield "parameter" if isinstance(tensor, nn.Parameter) else "buffer", tensor
