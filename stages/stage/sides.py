"""The graph of a backward as it will run, and what lies beside the way to a goal in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Root = tuple[torch.Tensor | GradientEdge, torch.Tensor | None]  # where a backward begins, with what

# A node with one gradient arriving, from which each of its own is computed apart: half of it costs half.
HALVED = frozenset(
    f"{name}Backward0" for name in ("Addmm", "Mm", "Addbmm", "Baddbmm", "Bmm", "Addmv", "Mv", "Convolution")
)


class Graph:
    """The nodes that a backward from ``roots`` runs: which come after each, and which before."""

    def __init__(self, roots: Sequence[Root]) -> None:
        """Walk from ``roots``, each node once."""
        self.roots = [node_of(root) for root in roots]
        self.after: dict[Node, list[Node]] = {}
        self.before: dict[Node, list[Node]] = {}
        to_visit = self.roots[::-1]
        while to_visit:
            node = to_visit.pop()
            if node in self.after:
                continue
            after = self.after[node] = [found for found, _ in node.next_functions if found is not None]
            for found in after:
                self.before.setdefault(found, []).append(node)
            to_visit += after

    @property
    def leaves(self) -> list[Node]:
        """Where gradients gather: the parameters."""
        return [node for node in self.after if hasattr(node, "variable")]

    def leading(self, goals: Iterable[Node]) -> set[Node]:
        """The goals and every node that leads to one."""
        leading: set[Node] = set()
        to_visit = list(goals)
        while to_visit:
            node = to_visit.pop()
            if node not in leading:
                leading.add(node)
                to_visit += self.before.get(node, ())
        return leading

    def ahead(self, goal: Node, seen: set[Node]) -> list[Node]:
        """The nodes that must run before ``goal``, but for those ``seen`` and what is ahead of them."""
        found = []
        to_visit = list(self.before.get(goal, ()))
        while to_visit:
            node = to_visit.pop()
            if node not in seen:
                seen.add(node)
                found.append(node)
                to_visit += self.before.get(node, ())
        return found


class Sides:
    """What lies beside the way to the goals, by where it leaves it: at a node, or None for at a root.

    ``later``: the leaves (parameters) that a second half may start for from there, of that side alone.
    ``early``: the leaves of all others, which the first half must reach."""

    def __init__(self, graph: Graph, leading: set[Node]) -> None:
        """``leading``: the nodes that lead to a goal, see ``Graph.leading``."""
        self._graph = graph
        self._owners: dict[Node, Node | None] = {}
        self._whole: set[Node | None] = set()
        leaves: dict[Node | None, list[Node]] = {}
        leaves[None] = self._claim(None, [root for root in graph.roots if root not in leading])
        for node, after in graph.after.items():
            if node in leading:
                leaves[node] = self._claim(node, [found for found in after if found not in leading])
        self.later = {side: found for side, found in leaves.items() if found and side not in self._whole}
        self.early = [leaf for side, found in leaves.items() if side in self._whole for leaf in found]

    def _claim(self, side: Node | None, starts: list[Node]) -> list[Node]:
        """The leaves behind ``starts``, which belong to ``side``; what two sides reach makes both whole."""
        if starts and side is not None and type(side).__name__ not in HALVED:
            self._whole.add(side)
        leaves = []
        while starts:
            node = starts.pop()
            if node in self._owners:
                if self._owners[node] is not side:
                    self._whole |= {side, self._owners[node]}
                continue
            self._owners[node] = side
            if side is not None and isinstance(node, BackwardCFunction):
                self._whole.add(side)  # it may make a gradient of none: only its own whole backward knows
            if hasattr(node, "variable"):
                leaves.append(node)
            starts += self._graph.after[node]
        return leaves


def node_of(root: Root) -> Node:
    """The node at which a backward from ``root`` begins."""
    begin, _ = root
    return (begin if isinstance(begin, GradientEdge) else get_gradient_edge(begin)).node
