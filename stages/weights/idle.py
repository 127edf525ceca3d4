"""One version of a stage's parameters, and where it waits while no instruction reads it.

A version that waits may be packed, where it is or in host memory: its memory is freed under the views that
autograd saved of it, and filled again with the same bits before the backward that reads them.
Source: claims A5 and A6 of CN115016937A (versions that are idle may leave the device)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...compression.buffers import Frame
from ...compression.codec import decode, encode
from ..memory.packer import FOR_SAVED
from ..memory.stores import Store, UnpooledBuffers


class Version:
    """The values of all parameters after ``number`` updates; it never changes, so it is packed once.

    Without a ``store`` it stays on the device; with one, the tensors that shrink there wait there as frames.
    ``tensors`` is empty while they are the parameters' own; ``ours``: nobody else looks into their memory."""

    def __init__(
        self, number: int, tensors: Iterable[Tensor] = (), *, ours: bool = True, store: Store | None
    ) -> None:
        """Begin in place, or with ``tensors``."""
        self.number, self.tensors, self.ours = number, list(tensors), ours
        self.store, self._fresh = store, UnpooledBuffers()
        self._frames: dict[int, tuple[object, int]] = {}  # by place in tensors: key and bytes
        self._packed = self._away = False

    @property
    def num_bytes(self) -> int:
        """Bytes of its frames, and of the tensors that are in memory."""
        here = (t.untyped_storage().nbytes() if self._own(t) else t.nbytes for t in self.tensors)
        return sum(here) + sum(num_bytes for _, num_bytes in self._frames.values())

    def leave(self) -> None:
        """No instruction reads it for a while: pack what shrinks, the first time, and free its memory."""
        if not self._packed and self.store is not None:
            self._packed = True
            for place, tensor in enumerate(self.tensors):
                self._pack(place, tensor, self.store)
        for place in self._frames:
            self.tensors[place].untyped_storage().resize_(0)
        self._away = True

    def fetch(self) -> None:
        """An instruction reads it soon: begin to bring the frames back to the device."""
        if self._away and self.store is not None:
            for key, _ in self._frames.values():
                self.store.fetch(key)

    def bring(self) -> None:
        """An instruction reads it now: fill the memory again, under all views of it."""
        if self._away and self.store is not None:
            for place, (key, _) in self._frames.items():
                _fill(self.tensors[place], self.store.get(key))
        self._away = False

    def drop(self) -> list[Tensor]:
        """Nothing reads it again: forget the frames; returns tensors whose memory may be written anew."""
        if self.store is None:
            return self.tensors if self.ours else []
        for key, _ in self._frames.values():
            self.store.drop(key)
        self._frames.clear()
        return []

    def _own(self, tensor: Tensor) -> bool:
        """Whether a tensor is all of its memory, which nobody else knows."""
        return self.ours and tensor.untyped_storage().resizable()

    def _pack(self, place: int, tensor: Tensor, store: Store) -> None:
        if not self._own(tensor):
            return
        frame = encode(_flat(tensor), FOR_SAVED)
        if frame.numel() < tensor.untyped_storage().nbytes() or store.takes_away(tensor.device):
            self._frames[place] = object(), frame.numel()
            store.put(self._frames[place][0], Frame(frame, frame.numel(), self._fresh))


def copy_of(tensor: Tensor) -> Tensor:
    """The same values at the same strides, in new memory that begins like any tensor's."""
    new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return new.copy_(tensor)


def _flat(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """All the memory of ``tensor`` as one row."""
    dtype, storage = dtype or tensor.dtype, tensor.untyped_storage()
    row = torch.empty(0, dtype=torch.uint8, device=tensor.device).view(dtype)
    return row.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))


def _fill(tensor: Tensor, frame: Frame) -> None:
    num_bytes = _span(tensor) * tensor.itemsize
    tensor.untyped_storage().resize_(num_bytes)
    packed = frame.buffer[: frame.num_bytes]
    if packed.is_cuda:
        flat = decode(packed)
        assert flat is not None, "a version has values"
        _flat(tensor).copy_(flat)
    else:
        decode(packed, _flat(tensor, torch.uint8))


def _span(tensor: Tensor) -> int:
    """Elements from the first of ``tensor`` to behind its last; its memory has no others."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))
