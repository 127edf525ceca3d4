"""A stage's backward in two halves: the gradients of what it received, then those of its weights.

Upstream waits only for the first half, so the second can fill what would be a bubble. A matrix product or
a convolution has two gradients that are products of what arrives there: the first half computes one and keeps
what arrived, the second starts again from there. Everything else (norms, sums, parameters with several users,
whose order of summation is autograd's) is computed whole, in the first half, by the calls of a whole
backward; so the bits are the same. Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.

Or a whole backward, in which the gradient of a layer's weights comes before that of its feature map
(``run_weights_first``). Of such a product only the former reads the feature map, so the latter may take its
memory; which comes first changes no bit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ..memory.activations import SavedRead
from ..torch_private import convolution_backend, run_engine, saved_names, saved_tensor

Root = tuple[torch.Tensor | GradientEdge, torch.Tensor | None]  # where a backward begins, with what

# A node with one gradient arriving, from which each of its own is computed apart: half of it costs half.
HALVED = frozenset(
    f"{name}Backward0" for name in ("Addmm", "Mm", "Addbmm", "Baddbmm", "Bmm", "Addmv", "Mv", "Convolution")
)
# By kind of product: its first operand's place among its edges, and the names of both where it saves them.
_OPERANDS = {"AddmmBackward0": (1, "mat1", "mat2"), "MmBackward0": (0, "self", "mat2")}


class Graph:
    """The nodes that a backward from ``roots`` runs: which come after each, and which before."""

    def __init__(self, roots: Sequence[Root]) -> None:
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
        """Nodes at which gradients gather: the parameters."""
        return [node for node in self.after if hasattr(node, "variable")]

    def leading(self, goals: Iterable[Node], seen: set[Node] | None = None) -> list[Node]:
        """The goals and every node that leads to one, but for those ``seen``, to which they are added."""
        seen, leading, to_visit = set() if seen is None else seen, list[Node](), list(goals)
        while to_visit:
            node = to_visit.pop()
            if node not in seen:
                seen.add(node)
                leading.append(node)
                to_visit += self.before.get(node, ())
        return leading


class Sides:
    """Nodes off the way to the goals, by where they leave it: at a node, or None for a root. ``later``: the
    leaves that a second half may start for from there; ``early``: all others, for the first half."""

    def __init__(self, graph: Graph, leading: Collection[Node]) -> None:
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


_COMPILED = "CompiledFunctionBackward"  # may run once only: its saved tensors become its results


class Arrived:
    """A hook on a halved node: keeps what arrives there first, and gives it back when it runs again."""

    __slots__ = ("gradients",)

    def __init__(self) -> None:
        self.gradients: tuple[torch.Tensor | None, ...] | None = None

    def __call__(self, gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...] | None:
        """Before every run of the node."""
        if self.gradients is None:
            self.gradients = gradients
            self.first()
            return None
        return self.gradients  # what hooks of others made of it is in it

    def first(self) -> None:
        """Before the node runs for the first time."""


class _Kept(Arrived):
    """The same in the first half of a split; ``ahead``: nodes that have run by then, and do not again."""

    __slots__ = ("ahead",)

    def __init__(self, ahead: list[Node]) -> None:
        super().__init__()
        self.ahead = ahead

    def first(self) -> None:
        """Make room for what arrived, and for what is going to."""
        _release(self.ahead)


class Split:
    """The backward of one micro-batch: ``inputs`` once, then ``weights`` once."""

    def __init__(self, roots: Sequence[Root]) -> None:
        self._roots = roots
        self._leaves: list[Node] | None = None  # that the second half starts for from the roots; None: all
        self._halves: list[tuple[Node, _Kept, list[Node]]] = []

    def inputs(self, anchor: torch.Tensor, *, release: bool = True, waiting: Sequence[Split] = ()) -> None:
        """Run towards ``anchor``, a leaf behind everything received, and towards what cannot wait;
        ``release`` on the way what autograd saved for this half alone. ``waiting``: micro-batches between
        their halves."""
        roots, goal = self._roots, get_gradient_edge(anchor).node
        graph = Graph(roots)
        if goal not in graph.after:
            return
        if any(type(node).__name__ == _COMPILED for node in graph.after):
            self._roots = []
            _keep_order(waiting, graph.leaves)
            run(roots)
            return
        leading = set(graph.leading([goal]))
        sides = Sides(graph, leading)
        _keep_order(waiting, sides.early)
        self._leaves = sides.later.pop(None, [])
        self._roots = [root for root in roots if self._leaves and node_of(root) not in leading]
        halves = {node: leaves for node, leaves in sides.later.items() if node is not None}
        waits, seen = bool(halves or self._roots), set(halves)
        for node, leaves in halves.items():
            kept = _Kept(graph.leading(graph.before.get(node, ()), seen) if release else [])
            node.register_prehook(kept)
            self._halves.append((node, kept, leaves))
        try:
            run(roots, [goal, *sides.early], retain=waits)
            _release(leading - seen if waits and release else ())
        finally:
            for _, kept, _ in self._halves:
                kept.ahead.clear()  # they hold the node that holds the hook

    @property
    def left(self) -> list[Node]:
        """The leaves that ``weights`` adds to."""
        beside = Graph(self._roots).leaves if self._leaves is None else self._leaves
        return [*beside, *(leaf for _, _, leaves in self._halves for leaf in leaves)]

    def weights(self) -> None:
        """Run what ``inputs`` left."""
        roots, self._roots = self._roots, []
        run(roots, self._leaves)
        halves, self._halves, self._leaves = self._halves[::-1], [], []
        while halves:
            run_half(*halves.pop())


def _keep_order(waiting: Sequence[Split], leaves: Iterable[Node]) -> None:
    """Run the second halves that wait if one adds to these ``leaves``: gradients add up by micro-batch."""
    # graphs differ where sizes do: what one computes whole, in its first half, another may leave
    first = set(leaves)
    if any(not first.isdisjoint(split.left) for split in waiting):
        for split in waiting:
            split.weights()


def run(roots: Sequence[Root], leaves: list[Node] | None = None, *, retain: bool = False) -> None:
    """One run of autograd's engine from ``roots``, if there are any; towards ``leaves`` only, if given."""
    if roots:
        assert leaves is None or leaves, "towards no leaf would mean towards all"
        run_engine(
            tuple([begin for begin, _ in roots]),
            tuple([torch.ones_like(begin) if g is None else g for begin, g in roots]),  # type: ignore[arg-type]
            () if leaves is None else tuple([GradientEdge(leaf, 0) for leaf in leaves]),
            retain=retain,
        )


def run_half(node: Node, arrived: Arrived, leaves: list[Node], *, retain: bool = False) -> None:
    """Run ``node`` and what is beside it towards ``leaves``, from what arrived there, if something did."""
    gradient = arrived.gradients[0] if arrived.gradients else None
    if gradient is not None:
        run([(GradientEdge(node, 0), gradient)], leaves, retain=retain)


@functools.lru_cache(maxsize=1024)
def _saved_names(kind: type[Node]) -> tuple[str, ...]:
    # but for those that the model holds too
    return tuple(name for name in saved_names(kind) if "weight" not in name and "running" not in name)


def _release(nodes: Iterable[Node]) -> None:
    for node in nodes:
        for name in _saved_names(type(node)):
            saved = saved_tensor(node, name)
            for tensor in saved if isinstance(saved, tuple | list) else (saved,):
                exchange(tensor, lambda _: None, _refuse)


def exchange(saved: Any, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
    """Exchange a saved tensor for what ``pack`` makes of it, unless there is none or others keep it."""
    with contextlib.suppress(RuntimeError):
        saved.register_hooks(pack, unpack)


def _refuse(_: None) -> torch.Tensor:
    raise RuntimeError("this part of the graph ran in the first half of a backward and was let go of")


class _First(Arrived):
    """A hook on a halved node: runs the half of its weights before the rest."""

    __slots__ = ("leading", "leaves", "node")

    def __init__(self, node: Node, leaves: list[Node], leading: set[Node]) -> None:
        super().__init__()
        self.node, self.leaves, self.leading = node, leaves, leading

    def first(self) -> None:
        """Half of the node, inside the run that is about to run it."""
        run_half(self.node, self, self.leaves, retain=True)
        self.gradients = None  # the outer run alone holds it, as without this hook
        kind = type(self.node).__name__
        if kind == "ConvolutionBackward0":
            _hollow_out(self.node)
        elif kind in _OPERANDS:
            place, *names = _OPERANDS[kind]
            operands = [after in self.leading for after, _ in self.node.next_functions][place : place + 2]
            if sum(operands) == 1:  # what it saved for the gradient of its weights alone
                _let_go(saved_tensor(self.node, names[operands.index(True)]))


def run_weights_first(roots: Sequence[Root], anchor: torch.Tensor) -> None:
    """Leave the bits of ``run(roots)``; ``anchor`` is a leaf behind everything received."""
    graph, end = Graph(roots), get_gradient_edge(anchor).node
    goals = [node for node in graph.after if node is end or type(node).__name__ in HALVED]
    leading = set(graph.leading(goals))
    sides = Sides(graph, leading)
    rest = sides.later.pop(None, [])
    found = {node: leaves for node, leaves in sides.later.items() if node is not None}
    hooks = [_First(node, leaves, leading) for node, leaves in found.items()]
    handles = [hook.node.register_prehook(hook) for hook in hooks]
    try:
        run(roots, [*goals, *sides.early, *rest] if hooks else None)
    finally:
        for handle in handles:  # a hook holds its node, which holds it
            handle.remove()


def _let_go(saved: Any) -> None:
    kept = None
    with contextlib.suppress(RuntimeError):  # there is none
        kept = getattr(saved, "data", None)
    if isinstance(kept, SavedRead):
        kept.give_up()
    else:
        exchange(saved, lambda _: None, lambda _: torch.empty(0))


def _hollow_out(node: Any) -> None:
    """Let go of a convolution's input, where the rest of ``node`` asks only for its geometry."""
    weight, backend_of = convolution_backend(node)

    def pack(tensor: torch.Tensor) -> torch.Tensor | tuple[Any, ...]:
        # others than oneDNN may lay it out anew or take slices of it before they see that it is not read
        is_plain = tensor.dim() >= 4 and _is_plain(tensor) and _is_plain(weight)
        if "Mkldnn" in backend_of(tensor) and is_plain:
            return tensor.size(), tensor.dtype
        return tensor.detach()

    exchange(saved_tensor(node, "input"), pack, _without_memory)


def _without_memory(kept: torch.Tensor | tuple[Any, ...]) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    tensor = torch.empty(kept[0], dtype=kept[1])
    tensor.untyped_storage().resize_(0)
    return tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the strides are those of a new tensor: by them a convolution knows a memory format."""
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()
