"""The graph of dependencies of a network: which layer reads and makes which data, forward and backward.

A view of LayerGraph, its probe and its profile, as plain data: a picture draws it, a program may read it;
``layer_dependencies.py`` finds it.
Source: claims B1.1-1.4 of CN110032450B: layer and data vertices, input -> layer -> output forward; backward
output -> layer -> input, and what the layer saved -> layer; the compute graph from layer to layer."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from ..files import save_json

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
