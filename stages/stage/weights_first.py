"""A backward in which the gradient of a layer's weights comes before that of its feature map.

Of a matrix product or a convolution only the former reads the feature map, so the latter may take its memory.
Both are products of their own: which comes first changes no bit. Behind the former nobody reads what arrived
either: the gradient of the feature map is written over it where that is exact (``reuse.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from ..memory.saved_tensor_hooks import SavedRead
from ..torch_private import convolution_backend, saved_tensor
from .reuse import ELEMENTWISE, Reuse
from .split_backward import HALVED, Arrived, Graph, Root, Sides, exchange, run, run_half

# By kind of product: its first operand's place among its edges, and the names of both where it saves them.
_OPERANDS = {"AddmmBackward0": (1, "mat1", "mat2"), "MmBackward0": (0, "self", "mat2")}


class _First(Arrived):
    """A hook on a halved node: runs the half of its weights before the rest."""

    __slots__ = ("leading", "leaves", "node", "reuse")

    def __init__(self, node: Node, leaves: list[Node], leading: set[Node], reuse: Reuse) -> None:
        super().__init__()
        self.node, self.leaves, self.leading, self.reuse = node, leaves, leading, reuse

    def first(self) -> tuple[torch.Tensor | None, ...] | None:
        """Half of the node, inside the run that is about to run it."""
        run_half(self.node, self, self.leaves, retain=True)
        arrived, self.gradients = self.gradients, None  # the outer run alone holds it, as without this hook
        kind = type(self.node).__name__
        if kind in _OPERANDS and (name := _feature_map(self.node, self.leading)):
            _let_go(saved_tensor(self.node, name))
        elif kind == "ConvolutionBackward0":
            _hollow_out(self.node)
        alone = sum(after in self.leading for after, _ in self.node.next_functions) == 1
        return self.reuse.offer(arrived) if arrived and alone and kind in _OPERANDS else None


def run_weights_first(roots: Sequence[Root], anchor: torch.Tensor, reuse: Reuse) -> None:
    """Leave the bits of ``run(roots)``; ``anchor`` is a leaf behind everything received.

    Args:    reuse: writes gradients over those that they are computed from."""
    graph, end = Graph(roots), get_gradient_edge(anchor).node
    goals = [node for node in graph.after if node is end or type(node).__name__ in HALVED]
    leading = graph.leading(goals)
    sides = Sides(graph, leading)
    rest = sides.later.pop(None, [])
    found = {node: leaves for node, leaves in sides.later.items() if node is not None}
    hooks = [_First(node, leaves, leading, reuse) for node, leaves in found.items()]
    handles = [hook.node.register_prehook(hook) for hook in hooks]
    once = (node for node in graph.after if node not in found and _reads_once(node))
    handles += [node.register_prehook(reuse.offer) for node in once]
    try:
        run(roots, [*goals, *sides.early, *rest] if hooks else None)
    finally:
        for handle in handles:  # a hook holds its node, which holds it
            handle.remove()


def _reads_once(node: Node) -> bool:
    """Return whether a node computes one gradient, of what arrives."""
    kind = type(node).__name__
    return kind in ELEMENTWISE or (
        kind in _OPERANDS and sum(n is not None for n, _ in node.next_functions) == 1
    )


def _feature_map(node: Any, leading: set[Node]) -> str | None:
    """The name of what a product saved for the gradient of its weights alone, if there is such a tensor."""
    place, *names = _OPERANDS[type(node).__name__]
    passed_on = [after in leading for after, _ in node.next_functions[place : place + 2]]
    return names[passed_on.index(True)] if sum(passed_on) == 1 else None


def _let_go(saved: Any) -> None:
    """Let go of a saved tensor that is not read again, here or in a memory tier."""
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
        """Others than oneDNN may lay it out anew or take slices of it before they see that it is not read."""
        if (
            "Mkldnn" not in backend_of(tensor)
            or tensor.dim() < 4
            or not (_is_plain(tensor) and _is_plain(weight))
        ):
            return tensor.detach()
        return tensor.size(), tensor.dtype

    exchange(saved_tensor(node, "input"), pack, _without_memory)


def _without_memory(kept: torch.Tensor | tuple[Any, ...]) -> torch.Tensor:
    if isinstance(kept, torch.Tensor):
        return kept
    tensor = torch.empty(kept[0], dtype=kept[1])
    tensor.untyped_storage().resize_(0)
    return tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the strides are those of a new tensor, by which a convolution knows its memory
    format."""
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()
