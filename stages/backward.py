"""A stage's backward in two halves: the gradients of what it received, then those of its weights.

Upstream waits only for the first half, so the second can fill what would be a bubble. A matrix product or a
convolution has two gradients that are products of their own, of the same gradient that arrives there: the
first half computes one and keeps what arrived, the second starts again from there. Everything else (norms,
sums, parameters with several users, whose order of summation is autograd's) is computed whole, once, in the
first half, by the very calls of a whole backward; so the bits are the same.
Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Root = tuple[torch.Tensor | GradientEdge, torch.Tensor | None]  # where a backward begins, with what

# Nodes with one gradient arriving, from which each of theirs is computed apart: a half costs half.
_HALVED = frozenset(
    f"{name}Backward0" for name in ("Addmm", "Mm", "Addbmm", "Baddbmm", "Bmm", "Addmv", "Mv", "Convolution")
)
_COMPILED = "CompiledFunctionBackward"  # may run once only: its saved tensors become its results


class _Graph:
    """The nodes that a backward from ``roots`` runs: which come after each, and which before."""

    def __init__(self, roots: Iterable[Node]) -> None:
        self.roots = list(roots)
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


class _Sides:
    """What lies beside the way to the goals, by where it leaves it: at a node, or None for at a root.

    ``later``: the leaves (parameters) that a second half may start for from there, of that side alone.
    ``early``: the leaves of all others, which the first half must reach."""

    def __init__(self, graph: _Graph, leading: set[Node]) -> None:
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
        if starts and side is not None and type(side).__name__ not in _HALVED:
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


class _Arrived:
    """A hook on a halved node: keeps what arrives there first, and gives it back when it runs again."""

    __slots__ = ("gradients",)

    def __init__(self) -> None:
        self.gradients: tuple[torch.Tensor | None, ...] | None = None

    def __call__(self, gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
        if self.gradients is None:
            self.gradients = gradients
            return None
        return self.gradients  # what hooks of others made of it is in it


class Split:
    """The backward of one micro-batch: ``inputs`` once, then ``weights`` once."""

    def __init__(self, roots: Sequence[Root]) -> None:
        """From ``roots``; nothing runs yet."""
        self._roots = roots
        self._leaves: list[Node] | None = None  # that the second half starts for from the roots; None: all
        self._halves: list[tuple[Node, _Arrived, list[Node]]] = []

    def inputs(self, anchor: torch.Tensor) -> None:
        """Run towards ``anchor``, a leaf behind everything received, and towards what cannot wait."""
        roots, goal = self._roots, get_gradient_edge(anchor).node
        graph = _Graph(_node(root) for root in roots)
        if goal not in graph.after:
            return
        if any(type(node).__name__ == _COMPILED for node in graph.after):
            self._roots = []
            run(roots)
            return
        leading = graph.leading([goal])
        sides = _Sides(graph, leading)
        self._leaves = sides.later.pop(None, [])
        self._roots = [root for root in roots if self._leaves and _node(root) not in leading]
        for node, leaves in sides.later.items():
            assert node is not None
            arrived = _Arrived()
            node.register_prehook(arrived)
            self._halves.append((node, arrived, leaves))
        run(roots, [goal, *sides.early], retain=bool(self._halves or self._roots))

    def weights(self) -> None:
        """Run what ``inputs`` left."""
        roots, self._roots = self._roots, []
        run(roots, self._leaves)
        halves, self._halves = self._halves[::-1], []
        while halves:
            node, arrived, leaves = halves.pop()
            gradient = arrived.gradients[0] if arrived.gradients else None
            if gradient is not None:
                run([(GradientEdge(node, 0), gradient)], leaves)


def run(roots: Sequence[Root], leaves: list[Node] | None = None, *, retain: bool = False) -> None:
    """One run of autograd's engine from ``roots``, if there are any; towards ``leaves`` only, if given."""
    if not roots:
        return
    torch.autograd.backward(
        [begin for begin, _ in roots],  # pyright: ignore[reportArgumentType] (a mixed list)
        [gradient for _, gradient in roots],
        retain_graph=retain,
        inputs=None if leaves is None else [GradientEdge(leaf, 0) for leaf in leaves],
    )


def _node(root: Root) -> Node:
    begin, _ = root
    return (begin if isinstance(begin, GradientEdge) else get_gradient_edge(begin)).node
