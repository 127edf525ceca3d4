"""Profiles in the text format of PipeDream, which others have published: nodes with times and sizes, edges.

Source: Narayanan et al., PipeDream, SOSP 2019; its repository's ``profiler``, ``graph.txt``."""

from __future__ import annotations

import graphlib
import re
from pathlib import Path

from ...compression.errors import PlanError
from .network_profile import LayerProfile, Profile, ValueProfile

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NODE = re.compile(r"^(\S+) -- (.*?) -- " + ", ".join(rf"{name}=([^,]+)" for name in _FIELDS))
_EDGE = re.compile(r"^\s+(\S+) -- (\S+)\s*$")


def read_pipedream(path: str | Path) -> Profile:
    """Read a graph: times in milliseconds, sizes in bytes, of one micro-batch, taken as one sample.

    Raises:
        PlanError: The file is missing or no such graph, a time is negative, or the graph has a cycle."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read the graph {path}: {error}") from error
    nodes, edges = dict[str, list[float]](), dict[str, set[str]]()
    for number, line in enumerate(lines, 1):
        if found := _EDGE.match(line):
            edges.setdefault(found[2], set()).add(found[1])
        elif found := _NODE.match(line):
            nodes[found[1]] = [
                _total(text, f"{name} of {found[1]}, {path}")
                for name, text in zip(_FIELDS, found.groups()[2:], strict=True)
            ]
        elif line.strip():
            raise PlanError(
                f"line {number} of {path} is neither a node nor an edge of PipeDream: {line[:60]!r}"
            )
    if not nodes or not edges.keys() <= nodes.keys() or not set().union(*edges.values()) <= nodes.keys():
        raise PlanError(
            f"a graph of PipeDream has nodes, and edges between them, {path} has not; take another"
        )
    try:
        order = list(graphlib.TopologicalSorter({name: edges.get(name, ()) for name in nodes}).static_order())
    except graphlib.CycleError as error:
        raise PlanError(f"a graph has no cycle, found {' -> '.join(error.args[1])} in {path}") from error
    place = {name: index for index, name in enumerate(order)}
    users = {name: sorted(place[user] for user, made in edges.items() if name in made) for name in order}
    return Profile(
        layers=tuple(
            LayerProfile(
                name=name,
                module="",
                forward_seconds=forward / 1000,
                backward_seconds=backward / 1000,
                parameters=(f"{name}.weight",) if parameters else (),
                num_parameters=round(parameters / 4),
                parameter_bytes=round(parameters),
                saved_bytes=round(size),
            )
            for name in order
            for forward, backward, size, parameters in [nodes[name]]
        ),
        values=tuple(
            ValueProfile(
                name=name,
                producer=place[name],
                users=tuple(users[name]),
                num_bytes=round(nodes[name][2]),
                requires_grad=True,
                zero_fraction=0.0,
            )
            for name in order
        ),
        refused={},
        fingerprint=Path(path).name,
        input_shapes=((1,),),
        input_dtypes=("float32",),
        num_samples=1,
        threads=1,
        device="cpu",
        torch="",
    )


def _total(text: str, what: str) -> float:
    """The number in a field, or the sum of a list of them: ``[1.0; 2.0]``."""
    try:
        found = [float(part) for part in text.strip("[] ").split(";")]
    except ValueError as error:
        raise PlanError(f"{what} is a number, or a list [1.0; 2.0], found {text!r}") from error
    if not all(0 <= one < float("inf") for one in found):
        raise PlanError(f"{what} is never negative, found {text}")
    return sum(found)
