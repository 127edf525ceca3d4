"""Compact forms of a saved storage that follow from the layers that saved it, beside what a codec finds.

The layers that saved a storage are those whose backwards read it, so a form may leave out what these do not
read. Every form is lossless for them, and off wherever the layers do not prove it:

    saved by ReLU (its result) and max-pools (their input, for its shape)    one bit per element
    saved by max-pools alone                                                 nothing
    indices of a max-pool                   places inside the window, 2 or 4 bits; checked exactly
    noise of a dropout                      two words and one bit per element; checked exactly
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ...compression.geometry import geometry
from ..tracing.dataflow import is_unmodified
from ..tracing.layers import Layer
from .saved_storage import Bytes, TensorView, new_bytes, row_view, view_of

_KINDS: dict[Any, str] = {
    nn.ReLU: "relu", F.relu: "relu", torch.relu: "relu", torch.relu_: "relu",
    Tensor.relu: "relu", Tensor.relu_: "relu",
    nn.MaxPool2d: "pool", F.max_pool2d: "pool", torch.max_pool2d: "pool",
    nn.Dropout: "dropout", F.dropout: "dropout", torch.dropout: "dropout",
}  # fmt: skip
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
Modules = Mapping[str, nn.Module]
Sizes = Mapping[fx.Node, tuple[int, ...]]


class Compact(NamedTuple):
    """A compact form of a storage: one row of fewer bytes, and how they become the storage again."""

    tensor: Tensor
    expand: Callable[[Tensor], Bytes]


class Window(NamedTuple):
    """The window of a max-pool: (height, width) each."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


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

    def compress(self, flat: Tensor, views: Sequence[TensorView], inputs: Sizes) -> Compact | None:
        """Return a compact form of the storage ``flat`` that ``views`` see, or None.

        Args:    flat: the whole storage, in the dtype of its first view.
                 inputs: what size the input of a max-pool had, by the pool's node."""
        kinds = {self.kind(view.layer) for view in views}
        if not flat.is_cpu or not flat.numel() or {view.dtype for view in views} != {flat.dtype}:
            return None
        if kinds == {"pool"} and flat.dtype is torch.int64:
            return self._window_local(flat, views, inputs)
        if not flat.is_floating_point():
            return None
        if kinds == {"pool"}:
            return shape_alone(flat)
        if "relu" in kinds and kinds <= {"relu", "pool"}:
            return signs(flat)
        return two_words(flat) if kinds == {"dropout"} else None

    def _window_local(self, flat: Tensor, views: Sequence[TensorView], inputs: Sizes) -> Compact | None:
        (layer, *others) = {view.layer for view in views}
        if others or layer is None or layer.node not in inputs:
            return None
        window = window_of(layer, self._modules)
        return window and window_local(flat, views[0], window, inputs[layer.node][-1])


def window_of(layer: Layer, modules: Modules) -> Window | None:
    """The window of a max-pool layer; None where it is not written down as plain numbers."""
    names = ("kernel_size", "stride", "padding", "dilation")
    if layer.node.op == "call_module":
        module = modules[str(layer.node.target)]
        found = {name: getattr(module, name) for name in names}
    else:
        found = {"stride": None, "padding": 0, "dilation": 1}
        found |= dict(zip(names, layer.node.args[1:5], strict=False))
        found |= {name: layer.node.kwargs[name] for name in names if name in layer.node.kwargs}
    # Torch takes None and () for the kernel.
    found["stride"] = found.get("stride") or found.get("kernel_size")
    pairs = [(n, n) if isinstance(n := found.get(name), int) else n for name in names]
    plain = all(
        isinstance(p, tuple | list) and len(p) in (1, 2) and all(type(n) is int for n in p) for p in pairs
    )
    return Window(*((p[0], p[-1]) for p in pairs)) if plain else None  # type: ignore[index]


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


def window_local(indices: Tensor, view: TensorView, window: Window, width: int) -> Compact | None:
    """Places inside the window for the int64 ``indices`` of a max-pool over rows of ``width`` elements.

    Returns: 2 bits per index for up to 4 places, 4 bits for up to 16, else 8; None unless they come back
             exactly (checked), and the indices fill their storage."""
    geo = geometry(view.size, view.stride, view.dtype.itemsize)
    num_places = window.kernel[0] * window.kernel[1]
    if view.start or geo.num_elements != indices.numel() or geo.order != "dense" or num_places > 255:
        return None
    bits = next(bits for bits in (2, 4, 8) if num_places <= 1 << bits)
    corners, steps = _corners(view.size, window, width), _steps(window, width)
    from_corner = indices.as_strided(view.size, view.stride) - corners
    least, most = (int(n) for n in from_corner.aminmax())
    if least < 0 or most > int(steps.max()):
        return None
    table = torch.zeros(int(steps.max()) + 1, dtype=torch.uint8)
    table[steps] = torch.arange(num_places, dtype=torch.uint8)
    places = torch.empty_strided(view.size, view.stride, dtype=torch.uint8)
    places.copy_(table[from_corner])
    packed = _nibbles(places.as_strided(indices.shape, (1,)), bits)
    expand = functools.partial(_from_places, view, window, width, bits, indices.data_ptr() % 64)
    found = expand(packed)
    again = view_of(indices).over(found)
    return Compact(packed, expand) if torch.equal(again, indices) else None


def _corners(size: Sequence[int], window: Window, width: int) -> Tensor:
    """The index where the window of every output begins, shape (height, width) of the output."""
    rows = torch.arange(size[-2]) * window.stride[0] - window.padding[0]
    columns = torch.arange(size[-1]) * window.stride[1] - window.padding[1]
    return rows[:, None] * width + columns


def _steps(window: Window, width: int) -> Tensor:
    """From the corner of a window to each of its places, in index steps."""
    rows = torch.arange(window.kernel[0]) * window.dilation[0] * width
    return (rows[:, None] + torch.arange(window.kernel[1]) * window.dilation[1]).flatten()


def _from_places(
    view: TensorView, window: Window, width: int, bits: int, address: int, packed: Tensor
) -> Bytes:
    num_elements = torch.Size(view.size).numel()
    places = _from_nibbles(packed, bits, num_elements).as_strided(view.size, view.stride)
    found = new_bytes(num_elements * 8, address)
    view.over(found).copy_(_steps(window, width)[places.int()] + _corners(view.size, window, width))
    return found


def _nibbles(places: Tensor, bits: int) -> Tensor:
    """Bytes that hold 8 / ``bits`` of the small numbers ``places`` each, the first one lowest."""
    per_byte = 8 // bits
    rows = F.pad(places, (0, -places.numel() % per_byte)).view(-1, per_byte)
    packed = rows[:, 0].clone()
    for k in range(1, per_byte):
        packed |= rows[:, k] << (bits * k)
    return packed


def _from_nibbles(packed: Tensor, bits: int, num_places: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    return ((packed[:, None] >> shifts) & ((1 << bits) - 1)).flatten()[:num_places]
