"""The hooks on what autograd saves: which tensors may leave, and which storage each of them belongs to.

Hooks see everything that is saved, weights and scalars too; what pays is a storage of some size that the
forward made. In doubt a tensor passes through, which is always right.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...compression.dtypes import DTYPE_NUMBERS
from ..tracing.layers import Layer
from .framed import span_bytes
from .held import Held, Record, Untouched
from .keeper import Keeper

_PART = 8  # a tensor that looks into less than this part of its storage leaves it where it is
# What autograd calls the views of a tensor and its cast: behind them, a weight is still the weight.
_PASSED_ON = frozenset(
    f"{name}Backward{number}"
    for name in (
        "ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "AsStrided",
        "Expand", "Squeeze", "Unsqueeze", "Slice", "Select", "Split", "SplitWithSizes", "Unbind", "Unflatten",
    )
    for number in range(2)
)  # fmt: skip


class Weights:
    """Tells parameters, buffers and their casts from what the forward makes; in doubt it is a weight."""

    def __init__(self, keep: Iterable[Tensor]) -> None:
        """``keep``: tensors that pass through, with everything in their memory and frozen ones' casts."""
        known = [tensor for tensor in keep if tensor.layout is torch.strided]
        found = [StorageWeakRef(tensor.untyped_storage()) for tensor in known]
        self._storages = {reference.cdata: reference for reference in found}  # so no other gets its number
        self._shapes = {tuple(tensor.shape) for tensor in known}

    def also(self, keep: Iterable[Tensor]) -> Weights:
        """Those and more."""
        more = Weights(keep)
        more._storages |= self._storages
        more._shapes |= self._shapes
        return more

    def hold(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is one of them."""
        base = tensor if tensor._base is None else tensor._base
        if base.is_leaf and base.requires_grad:
            return True
        if tensor.untyped_storage()._cdata in self._storages:
            return True
        if base.is_leaf:  # autocast casts frozen weights outside the graph
            return tensor.dtype in (torch.bfloat16, torch.float16) and tuple(base.shape) in self._shapes
        return _comes_from_leaf(tensor)


def _comes_from_leaf(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a cast or view of a leaf: autocast saves its own copies of the weights."""
    function = tensor.grad_fn
    while function is not None and function.name() in _PASSED_ON:
        function = function.next_functions[0][0]
    return function is not None and function.name() == "torch::autograd::AccumulateGrad"


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is nothing but a part of its storage, on a device that we pack on."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and tensor.dtype in DTYPE_NUMBERS
        and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # pyright: ignore[reportAttributeAccessIssue]
        and tensor.data_ptr() % tensor.itemsize == 0
    )


class Hooks:
    """The saved-tensor hooks of one forward, or of several that nobody tells apart.

    Args:    took: called with every storage that is to leave, when its first tensor was saved.
             layer: which layer runs now, as far as anybody knows."""

    def __init__(
        self,
        keeper: Keeper,
        *,
        weights: Weights,
        min_bytes: int,
        took: Callable[[Held], None],
        layer: Callable[[], Layer | None] = lambda: None,
    ) -> None:
        """Nothing is held yet."""
        self._keeper, self._weights, self._min_bytes, self._took = keeper, weights, min_bytes, took
        self._helds: weakref.WeakValueDictionary[int, Held] = weakref.WeakValueDictionary()
        self._latest: Callable[[], Held | None] = lambda: None
        self._layer = layer
        self._lock = threading.RLock()  # a GPU's backward saves, for a second one, in a thread of its own

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """The block in which autograd saves through these hooks."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack)

    def pack(self, tensor: Tensor) -> Record | Untouched:
        """What autograd holds in the place of ``tensor``."""
        if not _is_plain(tensor) or self._weights.hold(tensor):
            return Untouched(tensor)
        storage = tensor.untyped_storage()
        with self._lock:
            held = self._helds.get(storage._cdata)
            if held is not None and held.unmoved(storage) and held.writes.none_to(tensor):
                return held.add(tensor, self._layer())
            num_bytes = storage.nbytes()
            if num_bytes < self._min_bytes or span_bytes(tensor) * _PART < num_bytes:
                return Untouched(tensor)
            held = Held(tensor, keeper=self._keeper, before=self._latest())
            record = held.add(tensor, self._layer())
            self._helds[storage._cdata], self._latest = held, weakref.ref(held)
        self._took(held)
        return record


def _unpack(saved: Record | Untouched) -> Tensor:
    return saved.unpack()
