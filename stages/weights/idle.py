"""One version of a stage's parameters, and where it waits while no instruction reads it.

A version that waits may be packed, where it is or in host memory: its memory is freed under the views that
autograd saved of it, and filled again with the same bits before the backward that reads them.
Source: claims A5 and A6 of CN115016937A (versions that are idle may leave the device)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...compression.codec import decode, encode
from ...compression.pool import Frame
from ..memory.packer import FOR_SAVED
from ..memory.store import Store, UnpooledBuffers


class Version:
    """The values of all parameters after ``number`` updates, on the device for as long as it is kept.

    ``tensors`` is empty while they are the parameters' own; ``ours``: nobody else looks into their memory."""

    def __init__(self, number: int, tensors: Iterable[Tensor] = (), *, ours: bool = True) -> None:
        """Begin in place, or with ``tensors``."""
        self.number, self.tensors, self.ours = number, list(tensors), ours

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes now."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def leave(self) -> None:
        """No instruction reads it for a while."""

    def fetch(self) -> None:
        """One will soon."""

    def bring(self) -> None:
        """One does."""

    def drop(self) -> list[Tensor]:
        """None will ever again; returns tensors whose memory may be written anew."""
        return self.tensors if self.ours else []


class Idle(Version):
    """A version that waits in a store, but for tensors that do not shrink there.

    It is packed once, since it never changes; only its frames stay meanwhile."""

    def __init__(
        self, number: int, tensors: Iterable[Tensor] = (), *, ours: bool = True, store: Store
    ) -> None:
        """Wait in ``store``."""
        super().__init__(number, tensors, ours=ours)
        self.store, self._fresh = store, UnpooledBuffers()
        self._frames: dict[int, tuple[object, int]] = {}  # by place in tensors: key and bytes
        self._packed = self._away = False

    @property
    def num_bytes(self) -> int:
        """Bytes of its frames, and of the tensors that are in memory."""
        here = sum(tensor.untyped_storage().nbytes() for i, tensor in enumerate(self.tensors) if self._own(i))
        here += sum(tensor.nbytes for i, tensor in enumerate(self.tensors) if not self._own(i))
        return here + sum(num_bytes for _, num_bytes in self._frames.values())

    def leave(self) -> None:
        """Pack what shrinks, the first time, and free its memory."""
        if not self._packed:
            self._packed = True
            for place in range(len(self.tensors)):
                self._pack(place)
        for place in self._frames:
            self.tensors[place].untyped_storage().resize_(0)
        self._away = True

    def fetch(self) -> None:
        """Begin to bring the frames back to the device."""
        if self._away:
            for key, _ in self._frames.values():
                self.store.fetch(key)

    def bring(self) -> None:
        """Fill the memory again, under all views of it."""
        if not self._away:
            return
        for place, (key, _) in self._frames.items():
            _fill(self.tensors[place], self.store.get(key))
        self._away = False

    def drop(self) -> list[Tensor]:
        """Forget the frames; the memory is gone already."""
        for key, _ in self._frames.values():
            self.store.drop(key)
        self._frames.clear()
        return []

    def _own(self, place: int) -> bool:
        """Whether a tensor is all of its memory, which nobody else knows."""
        return self.ours and self.tensors[place].untyped_storage().resizable()

    def _pack(self, place: int) -> None:
        tensor = self.tensors[place]
        if not self._own(place):
            return
        frame = encode(_flat(tensor), FOR_SAVED)
        if frame.numel() < tensor.untyped_storage().nbytes() or self.store.takes_away(tensor.device):
            self._frames[place] = object(), frame.numel()
            self.store.put(self._frames[place][0], Frame(frame, frame.numel(), self._fresh))


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
