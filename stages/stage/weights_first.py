"""A backward in which the gradient of a layer's weights comes before that of its feature map.

Of a matrix product or a convolution only the former reads the feature map, so the latter may take its memory.
Both are products of their own: which comes first changes no bit.

Of what arrives at a layer nothing is read again once the gradient of its input is there, so one memory does
for both: an activation writes element by element, a matrix product by blocks of rows, where a row is not
longer than the one it is computed from. Whether a product by rows has the bits of the whole one only the
library that computes it knows: every shape is computed both ways once, and compared.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from ...compression.errors import StageError
from ..memory.saved_tensor_hooks import SavedRead
from ..torch_private import (
    convolution_backend,
    is_functorch_wrapped,
    num_storage_holders,
    num_tensor_holders,
    saved_tensor,
    tree_map,
    wrapper_subclass,
)
from .split_backward import HALVED, Arrived, Graph, Root, Sides, exchange, run, run_half

LEAST = 1 << 16  # bytes of a gradient from which on its memory is worth a few calls
_BLOCKS = 16  # a product by rows needs such a part of it beside what it writes over
_ROWS = 64  # blocks are multiples of as many rows, so that each begins where a tensor may
_ALIGNED = 64  # bytes; at other addresses kernels may be others
_TELLING = 8  # a trial counts where one of so many elements is another number than zero
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_ATEN = torch.ops.aten
_NAMES = "threshold", "gelu", "tanh", "sigmoid", "silu", "leaky_relu", "hardtanh", "softplus", "elu"
ELEMENTWISE = frozenset(f"{name.title().replace('_', '')}Backward0" for name in ("relu", *_NAMES))
"""Kinds of nodes whose one gradient has the shape of what arrives."""
_FUNCTIONS = [getattr(_ATEN, f"{name}_backward") for name in _NAMES]
# What such a node calls, and the call that writes the same into memory that is given.
_INTO = {function.default: function.grad_input for function in _FUNCTIONS}


class Spare(Tensor):
    """Note that a node gets in the place of a gradient that arrived, which nobody reads behind it."""

    gradient: Tensor | None
    reuse: Reuse

    @staticmethod
    def __new__(cls, gradient: Tensor, reuse: Reuse) -> Spare:
        """A note of ``gradient``, whose memory is free once the node has computed from it."""
        note = wrapper_subclass(cls, gradient)
        note.gradient, note.reuse = gradient, reuse
        return note

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute ``func`` over the gradient, if it is one of those that may; else from it."""
        named = dict(kwargs or {})
        if args and isinstance(args[0], Spare) and (func is _ATEN.mm.default or func in _INTO):
            return args[0].reuse.computed(func, args[0], args[1:], named)
        return func(*tree_map(_read, tuple(args)), **tree_map(_read, named))


def _read(item: Any) -> Any:
    """Read a note as the gradient; StageError if that was written over."""
    if isinstance(item, Spare) and item.gradient is None:
        raise StageError(
            "a gradient is read by the layer that it arrives at, found one that was read again after the "
            "gradient of the layer's input took its memory; train without weights_first, and report it"
        )
    return item.gradient if isinstance(item, Spare) else item


def _num_holders(note: Any, tensor: Any) -> tuple[int, ...]:
    """Numbers of holders of a gradient, and of the note in its place, while a node computes from it."""
    held = num_storage_holders(tensor.untyped_storage())
    return num_tensor_holders(note), num_tensor_holders(tensor), sys.getrefcount(tensor), held


class Reuse:
    """Writes gradients over others, and knows from trials where that is exact; one for a stage."""

    def __init__(self, *, least: int = LEAST) -> None:
        self.verdicts: dict[Hashable, bool] = {}  # the bits are the same, by all that may choose a kernel
        self.num_reused = self._least = 0
        self._nobody: tuple[int, ...] | None = None  # holders where there are none but the node itself
        with torch.enable_grad():
            output = torch.ones(1, requires_grad=True).relu()
            loss = output.mul(2)  # whose gradient others hold
        assert output.grad_fn is not None
        output.grad_fn.register_prehook(self.offer)
        loss.backward()
        assert self._nobody is not None, "a note reaches what a node calls"
        self._least = least

    def offer(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        """Return notes for a node that reads each gradient once; None: it gets what arrived."""
        gradient = gradients[0] if len(gradients) == 1 else None
        if gradient is None or not _is_whole(gradient) or gradient.nbytes < self._least:
            return None
        return (Spare(gradient, self),)

    def computed(self, function: Any, note: Spare, rest: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
        """Compute ``function`` of the gradient and the ``rest``, over the gradient if that is right."""
        gradient = _read(note)
        holders = _num_holders(note, gradient)
        if self._nobody is None:
            self._nobody = holders
            return function(gradient, *rest, **named)
        # 1. may it be written over
        over, fits = (_by_rows, _narrows) if function is _ATEN.mm.default else (_in_place, _is_alike)
        is_alone = all(ours <= theirs for ours, theirs in zip(holders, self._nobody, strict=True))
        key = _key(function, (gradient, *rest, *named.items())) if is_alone else None
        if key is None or not fits(gradient, rest) or self.verdicts.get(key) is False:
            return function(gradient, *rest, **named)
        # 2. it is known to be exact, or tried
        if key in self.verdicts:
            note.gradient = None
            self.num_reused += 1
            return over(function, gradient, rest, named)
        result = function(gradient, *rest, **named)
        # a trial counts where sums of the elements in another order would be others
        if int(gradient.count_nonzero()) * _TELLING >= gradient.numel() and bool(gradient.sum().isfinite()):
            note.gradient = None
            self.verdicts[key] = _same_bits(result, over(function, gradient, rest, named))
        return result


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor is the whole of its memory, row by row, but for an end that nobody reads."""
    return bool(
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.itemsize in _WORDS
        and tensor.storage_offset() == 0
        and tensor.is_contiguous()
        and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())
        and not is_functorch_wrapped(tensor)
        and tensor.untyped_storage().resizable()
        and tensor.data_ptr() % _ALIGNED == 0
    )


def _key(function: Any, operands: Sequence[Any]) -> Hashable:
    known = [
        (*_geometry(item), item.data_ptr() % _ALIGNED) if isinstance(item, Tensor) else item
        for item in operands
    ]
    return function, torch.get_num_threads(), *known


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.size(), tensor.stride(), tensor.dtype, tensor.device


def _same_bits(one: Tensor, other: Tensor) -> bool:
    word = _WORDS[one.itemsize]
    return _geometry(one) == _geometry(other) and torch.equal(one.view(word), other.view(word))


# -- element by element ---------------------------------------------------------------------------------


def _is_alike(gradient: Tensor, rest: Sequence[Any]) -> bool:
    return all(_geometry(item) == _geometry(gradient) for item in rest if isinstance(item, Tensor))


def _in_place(function: Any, gradient: Tensor, rest: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    return _INTO[function](gradient, *rest, **named, grad_input=gradient)


# -- a product, by blocks of rows -------------------------------------------------------------------------


def _blocks(num_rows: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of every block; the last one has what is left, so that none is of a few rows."""
    size = -(-num_rows // (_BLOCKS * _ROWS)) * _ROWS
    begins = list(range(0, num_rows - size + 1, size)) or [0]
    return zip(begins, [*begins[1:], num_rows], strict=True)


def _narrows(gradient: Tensor, rest: Sequence[Any]) -> bool:
    """Return whether rows of the product lie within those of the gradient, and use most of their memory."""
    other = rest[0]
    if type(other) is not Tensor or other.dtype is not gradient.dtype or gradient.dim() != 2:
        return False
    num_bytes = gradient.shape[0] * other.shape[1] * gradient.itemsize
    return num_bytes <= gradient.nbytes and 2 * num_bytes >= gradient.untyped_storage().nbytes()


def _by_rows(function: Any, gradient: Tensor, rest: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    other = rest[0]
    shape = gradient.shape[0], other.shape[1]
    product = gradient.new_empty(0).set_(gradient.untyped_storage(), 0, shape, (shape[1], 1))
    for begin, end in _blocks(shape[0]):
        product[begin:end] = function(gradient[begin:end], other, **named)
    return product


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
        kind, leads = type(self.node).__name__, [a in self.leading for a, _ in self.node.next_functions]
        if kind == "ConvolutionBackward0":
            _hollow_out(self.node)
        if kind not in _OPERANDS:
            return None
        place, *names = _OPERANDS[kind]
        operands = leads[place : place + 2]
        if sum(operands) == 1:  # what it saved for the gradient of its weights alone
            _let_go(saved_tensor(self.node, names[operands.index(True)]))
        return self.reuse.offer(arrived) if arrived and sum(leads) == 1 else None


def run_weights_first(roots: Sequence[Root], anchor: torch.Tensor, reuse: Reuse) -> None:
    """Leave the bits of ``run(roots)``; ``anchor`` is a leaf behind everything received."""
    graph, end = Graph(roots), get_gradient_edge(anchor).node
    goals = [node for node in graph.after if node is end or type(node).__name__ in HALVED]
    leading = set(graph.leading(goals))
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
