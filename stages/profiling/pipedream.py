"""Profiles in the text format of PipeDream, which others have published: nodes with times and sizes, edges.

Source: Narayanan et al., PipeDream, SOSP 2019; its repository's ``profiler``, ``graph.txt``."""

import graphlib
import re
from pathlib import Path

from ...compression.errors import PlanError

_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NODE = re.compile(
    r"^(\S+) -- (.*?) -- " + ", ".join(rf"{name}=([^,]+?)" for name in _FIELDS) + r"(?: -- .*)?$"
)
_EDGE = re.compile(r"^\s+(\S+) -- (\S+)\s*$")


def read_graph(path: str | Path) -> dict[str, tuple[list[float], tuple[str, ...]]]:
    """Read a graph: by name of a node, in running order, milliseconds of its forward and backward, bytes of
    its result and of its parameters, and the nodes that read the result.

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
    users = {name: tuple(user for user in order if name in edges.get(user, ())) for name in order}
    return {name: (nodes[name], users[name]) for name in order}


def _total(text: str, what: str) -> float:
    """The number in a field, or the sum of a list of them: ``[1.0; 2.0]``."""
    try:
        found = [float(part) for part in text.strip("[] ").split(";")]
    except ValueError as error:
        raise PlanError(f"{what} is a number, or a list [1.0; 2.0], found {text!r}") from error
    if not all(0 <= one < float("inf") for one in found):
        raise PlanError(f"{what} is never negative, found {text}")
    return sum(found)
