"""How a saved tensor lies in its storage: plain numbers that keep no memory alive.

Autograd saves tensors, but memory is freed by storages; a view is what makes the tensor again from a storage
that has come back.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...compression.dtypes import DTYPE_NUMBERS
from ...compression.errors import StageError
from ...compression.frame import ALIGNMENT
from ...compression.geometry import geometry
from ..device import CPU, KINDS
from ..tracing.layers import Layer


class Bytes(NamedTuple):
    """Where the bytes of a saved storage lie: byte 0 is at ``origin`` in ``storage`` (may be negative)."""

    storage: torch.UntypedStorage
    origin: int


class TensorView(NamedTuple):
    """The place of a tensor in its storage, and the layer that saved it (None: not known)."""

    layer: Layer | None
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int  # byte of the storage where its first element lies

    @property
    def num_bytes(self) -> int:
        """Bytes from its first element to behind its last, gaps included."""
        return geometry(self.size, self.stride, self.dtype.itemsize).span * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Byte of the storage behind its last element."""
        return self.start + self.num_bytes

    def over(self, found: Bytes) -> Tensor:
        """Return the tensor over ``found``.

        Raises: StageError: that storage was cut short since; torch would make it longer without a word."""
        if found.origin + self.end > found.storage.nbytes():
            raise StageError(
                "what the forward saved must keep its memory until its backward, found a storage of "
                f"{self.end} bytes or more that was resized to {found.storage.nbytes()}; do not free what a "
                "layer saved"
            )
        first = (found.origin + self.start) // self.dtype.itemsize
        return empty(self.dtype, found.storage.device).set_(found.storage, first, self.size, self.stride)


def view_of(tensor: Tensor, layer: Layer | None = None) -> TensorView:
    """Return how ``tensor``, saved by ``layer``, lies in its storage."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    return TensorView(layer, tensor.dtype, tuple(tensor.size()), tensor.stride(), start)


def is_elements(tensor: Tensor) -> bool:
    """Whether ``tensor`` is nothing but elements in memory, as they stand there, on a device that we know."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type in KINDS
        and tensor.dtype in DTYPE_NUMBERS
        and not (tensor.is_nested or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
        and tensor.data_ptr() % tensor.itemsize == 0
    )


def row_view(num_elements: int, dtype: torch.dtype) -> TensorView:
    """Return the view of a row of elements from the first byte on."""
    return TensorView(None, dtype, (num_elements,), (1,), 0)


def empty(dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
    """Return a tensor without elements; torch.empty itself warns of dtypes that it calls experimental."""
    return torch.empty(0, dtype=torch.uint8, device=device).view(dtype)


def new_bytes(num_bytes: int, address: int) -> Bytes:
    """Return new memory on the CPU that begins at ``address`` mod 64, not cleared."""
    storage = torch.UntypedStorage(num_bytes + ALIGNMENT)
    return Bytes(storage, (address - storage.data_ptr()) % ALIGNMENT)


def copied(item: Any) -> Any:
    """Return a tensor with the same strides in a copy of its storage; what is no tensor, as it is."""
    if not isinstance(item, Tensor):
        return item
    made = view_of(item).over(Bytes(item.untyped_storage().clone(), 0))
    return made.requires_grad_(item.requires_grad)


def bytes_around(start: int, tensor: Tensor) -> Bytes:
    """Return the bytes of a storage of which ``tensor`` is the part from byte ``start`` on."""
    storage = tensor.untyped_storage()
    return Bytes(storage, tensor.data_ptr() - storage.data_ptr() - start)
