"""Compact forms of a saved storage that follow from the layers that saved it, beside what a codec finds.

The layers that saved a storage are those whose backwards read it, so a form may leave out what these do not
read. Every form is lossless for them, and off wherever the layers do not prove it:

    saved by ReLU (its result) and max-pools (their input, for its shape)    one bit per element
    saved by max-pools alone                                                 nothing
    noise of a dropout                      two words and one bit per element; checked exactly
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..tracing.dataflow import is_unmodified
from ..tracing.layers import Layer
from .saved_storage import Bytes, TensorView, new_bytes, row_view

_KINDS: dict[Any, str] = {
    nn.ReLU: "relu", F.relu: "relu", torch.relu: "relu", torch.relu_: "relu",
    Tensor.relu: "relu", Tensor.relu_: "relu",
    nn.MaxPool2d: "pool", F.max_pool2d: "pool", torch.max_pool2d: "pool",
    nn.Dropout: "dropout", F.dropout: "dropout", torch.dropout: "dropout",
}  # fmt: skip
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
Modules = Mapping[str, nn.Module]


class Compact(NamedTuple):
    """A compact form of a storage: one row of fewer bytes, and how they become the storage again."""

    tensor: Tensor
    expand: Callable[[Tensor], Bytes]


class LayerAwareCompressor:
    """Chooses a compact form by layers; ``modules`` are those that the stage's layers call, by their path."""

    def __init__(self, modules: Modules) -> None:
        """Nothing is looked up before a layer saves something."""
        self._modules = modules

    def kind(self, layer: Layer | None) -> str:
        """``"relu"``, ``"pool"``, ``"dropout"``, or "" where a layer proves nothing."""
        if layer is None or layer.node.op == "get_attr":
            return ""
        if layer.node.op != "call_module":
            return _KINDS.get(layer.node.target, "")
        module = self._modules[str(layer.node.target)]
        return _KINDS.get(type(module), "") if is_unmodified(module) else ""

    def compress(self, flat: Tensor, views: Sequence[TensorView]) -> Compact | None:
        """Return a compact form of the storage ``flat``, in the dtype of its first view, or None."""
        kinds = {self.kind(view.layer) for view in views}
        if not flat.is_cpu or not flat.numel() or {view.dtype for view in views} != {flat.dtype}:
            return None
        if not flat.is_floating_point():
            return None
        if kinds == {"pool"}:
            return shape_alone(flat)
        if "relu" in kinds and kinds <= {"relu", "pool"}:
            return signs(flat)
        return two_words(flat) if kinds == {"dropout"} else None


def signs(flat: Tensor) -> Compact:
    """One bit per element: whether ReLU's backward lets the gradient through: not (x <= 0), so NaN does.

    It comes back as 1.0 for every set bit, 0.0 for the others."""
    return _bitmap((flat <= 0).logical_not_(), flat, flat.new_tensor(0), flat.new_tensor(1))


def shape_alone(flat: Tensor) -> Compact:
    """Nothing: a max-pool's backward goes by its indices, and reads no value of its input."""
    return Compact(flat[:0].view(torch.uint8), functools.partial(_zeros, flat.nbytes, flat.data_ptr() % 64))


def _zeros(num_bytes: int, address: int, nothing: Tensor) -> Bytes:
    """Return zeros, in pages that the system gives out when they are first touched: never."""
    storage = torch.zeros(num_bytes + 64, dtype=torch.uint8).untyped_storage()
    return Bytes(storage, (address - storage.data_ptr()) % 64)


def two_words(flat: Tensor) -> Compact | None:
    """Two different words and which of them stands where; None if there are more."""
    words = flat.view(_WORDS[flat.itemsize])
    low, high = words.aminmax()
    is_high = words == high
    if not (is_high | (words == low)).all():
        return None
    return _bitmap(is_high, flat, low.clone(), high.clone())


def _bitmap(is_high: Tensor, flat: Tensor, low: Tensor, high: Tensor) -> Compact:
    """One bit per element of ``flat``, which comes back as ``high`` where it is set and ``low`` elsewhere."""
    bits = torch.from_numpy(np.packbits(is_high.numpy(), bitorder="little"))
    return Compact(bits, functools.partial(_from_bitmap, flat.numel(), low, high, flat.data_ptr() % 64))


def _from_bitmap(num_elements: int, low: Tensor, high: Tensor, address: int, bits: Tensor) -> Bytes:
    found = new_bytes(num_elements * low.itemsize, address)
    is_high = torch.from_numpy(np.unpackbits(bits.numpy(), count=num_elements, bitorder="little"))
    row_view(num_elements, low.dtype).over(found).copy_(torch.where(is_high.view(torch.bool), high, low))
    return found
