"""A backward in which the gradient of a layer's weights comes before that of its feature map.

Of a matrix product or a convolution only the former reads the feature map, so the latter may take its memory.
Both are products of their own: which comes first changes no bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from ..memory.saved_tensor_hooks import SavedRead
from ..torch_private import convolution_backend, saved_tensor
from .split_backward import HALVED, Arrived, Graph, Root, Sides, exchange, run, run_half

# By kind of product: its first operand's place among its edges, and the names of both where it saves them.
_OPERANDS = {"AddmmBackward0": (1, "mat1", "mat2"), "MmBackward0": (0, "self", "mat2")}


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
