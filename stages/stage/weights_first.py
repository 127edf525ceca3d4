"""A backward in which the gradient of a layer's weights comes before that of its feature map.

Of a matrix product or a convolution only the former reads the feature map, so the latter may take its memory.
Both are products of their own: which comes first changes no bit. Behind the former nobody reads what arrived
either: the gradient of the feature map is written over it where that is exact.

Of what arrives at a layer nothing is read again once the gradient of its input is there, so one memory does
for both: an activation writes element by element, a matrix product by blocks of rows, where a row is not
longer than the one it is computed from. Whether a product by rows has the bits of the whole one is for the
library that computes it to say: every shape is computed both ways once, and compared.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
_OPERATIONS = {
    "ReluBackward0": _ATEN.threshold_backward,
    "ThresholdBackward0": _ATEN.threshold_backward,
    "GeluBackward0": _ATEN.gelu_backward,
    "TanhBackward0": _ATEN.tanh_backward,
    "SigmoidBackward0": _ATEN.sigmoid_backward,
    "SiluBackward0": _ATEN.silu_backward,
    "LeakyReluBackward0": _ATEN.leaky_relu_backward,
    "HardtanhBackward0": _ATEN.hardtanh_backward,
    "SoftplusBackward0": _ATEN.softplus_backward,
    "EluBackward0": _ATEN.elu_backward,
}
ELEMENTWISE = frozenset(_OPERATIONS)  # kinds of nodes whose one gradient has the shape of what arrives
# What such a node calls, and the call that writes the same into memory that is given.
_INTO = {operation.default: operation.grad_input for operation in _OPERATIONS.values()}


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
        named = kwargs or {}
        note = args[0] if args else None
        if isinstance(note, Spare) and (func is _ATEN.mm.default or func in _INTO):
            return note.reuse.computed(func, note, args[1:], named)
        return func(*tree_map(_read, tuple(args)), **tree_map(_read, dict(named)))


def _read(found: Any) -> Any:
    """A note is read as the gradient.

    Raises: StageError: it was written over."""
    if not isinstance(found, Spare):
        return found
    if found.gradient is None:
        raise StageError(
            "a gradient is read by the layer that it arrives at, found one that was read again after the "
            "gradient of the layer's input took its memory; train without weights_first, and report it"
        )
    return found.gradient


class _Holders(NamedTuple):
    """Numbers of holders of a gradient, and the note in its place, while a node computes from it."""

    note: int
    tensor: int
    python: int
    storage: int

    @classmethod
    def of(cls, note: Any, tensor: Any) -> _Holders:
        """As it is now."""
        held = num_storage_holders(tensor.untyped_storage())
        return cls(num_tensor_holders(note), num_tensor_holders(tensor), sys.getrefcount(tensor), held)

    def within(self, others: _Holders) -> bool:
        """Return whether nobody holds it but those that hold ``others`` too."""
        return all(ours <= theirs for ours, theirs in zip(self, others, strict=True))


class Reuse:
    """Writes gradients over others, and knows from trials where that is exact; one for a stage.

    Attributes: verdicts: whether the bits are the same, by all that may choose another kernel.
                num_reused: how often it was done."""

    def __init__(self, *, least: int = LEAST) -> None:
        self.verdicts: dict[Hashable, bool] = {}
        self.num_reused = 0
        self._least = 0
        self._nobody: _Holders | None = None  # beside the node itself
        with torch.enable_grad():
            made = torch.ones(1, requires_grad=True).relu()
            loss = made.mul(2)  # whose gradient others hold
        assert made.grad_fn is not None
        made.grad_fn.register_prehook(self.offer)
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
        holders = _Holders.of(note, gradient)
        if self._nobody is None:
            self._nobody = holders
            return function(gradient, *rest, **named)
        over = _by_rows if function is _ATEN.mm.default else _in_place
        key = _key(function, (gradient, *rest, *named.items())) if holders.within(self._nobody) else None
        if key is None or not _FITS[over](gradient, rest) or self.verdicts.get(key) is False:
            return function(gradient, *rest, **named)
        if key in self.verdicts:
            note.gradient = None
            self.num_reused += 1
            return over(function, gradient, rest, named)
        found = function(gradient, *rest, **named)
        if _tells(gradient):
            note.gradient = None
            self.verdicts[key] = _same_bits(found, over(function, gradient, rest, named))
        return found


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor is the whole of its memory, row by row, but for an end that is no longer
    read."""
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
    told = [
        (item.size(), item.stride(), item.dtype, item.device, item.data_ptr() % _ALIGNED)
        if isinstance(item, Tensor)
        else item
        for item in operands
    ]
    return function, torch.get_num_threads(), *told


def _tells(gradient: Tensor) -> bool:
    """Return whether sums of its elements in another order would be others."""
    few = int(gradient.count_nonzero()) * _TELLING < gradient.numel()
    return not few and bool(gradient.sum().isfinite())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    word = _WORDS[one.itemsize]
    alike = one.dtype is other.dtype and one.size() == other.size() and one.stride() == other.stride()
    return alike and torch.equal(one.view(word), other.view(word))


# -- element by element ---------------------------------------------------------------------------------


def _suit(gradient: Tensor, rest: Sequence[Any]) -> bool:
    others = [item for item in rest if isinstance(item, Tensor)]
    alike = (gradient.size(), gradient.stride(), gradient.dtype, gradient.device)
    return all((other.size(), other.stride(), other.dtype, other.device) == alike for other in others)


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
    made = gradient.shape[0] * other.shape[1] * gradient.itemsize
    return made <= gradient.nbytes and 2 * made >= gradient.untyped_storage().nbytes()


def _by_rows(function: Any, gradient: Tensor, rest: Sequence[Any], named: Mapping[str, Any]) -> Tensor:
    other = rest[0]
    shape = gradient.shape[0], other.shape[1]
    made = gradient.new_empty(0).set_(gradient.untyped_storage(), 0, shape, (shape[1], 1))
    for begin, end in _blocks(shape[0]):
        made[begin:end] = function(gradient[begin:end], other, **named)
    return made


_FITS: Mapping[Callable[..., Tensor], Callable[..., bool]] = {_by_rows: _narrows, _in_place: _suit}


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
