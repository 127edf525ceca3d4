"""Frames of the wire that may stand for what was saved: whose bytes they have, and whether they still do.

A frame belongs to the storage of its value, known by a reference that keeps its identity: an address is given
to another storage as soon as its own is freed.
Source: claims A8-A10 of CN115016937A (one module packs on every path out of a stage)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...compression.codec import CODECS, decode
from ...compression.frame import read_header
from ...compression.geometry import geometry
from ...compression.pool import Frame

if TYPE_CHECKING:
    from .held import Held


class Place(NamedTuple):
    """Where a tensor lies: a storage, and the bytes in it."""

    storage: StorageWeakRef  # while this lives, its number is not given to another
    start: int  # byte of the storage where its first element lies
    num_bytes: int  # from there to behind its last


def place(tensor: Tensor) -> Place:
    """Where ``tensor`` lies now."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    return Place(StorageWeakRef(tensor.untyped_storage()), start, span_bytes(tensor))


def span_bytes(tensor: Tensor) -> int:
    """Bytes from the first element of a tensor to behind its last."""
    return geometry(tuple(tensor.size()), tensor.stride(), tensor.itemsize).span * tensor.itemsize


class Framed(NamedTuple):
    """A frame, and the place of the tensor that it was made from or became.

    ``sure``: it was made from what is there now; else a layer may have written there since, and nothing
    counts what it writes through ``.data`` or NumPy."""

    frame: Frame
    place: Place
    sure: bool

    def covers(self, held: Held) -> bool:
        """Whether it has everything that the graph reads of ``held``, as it was when the frame was made."""
        if self.place.storage.cdata != held.original.cdata:
            return False
        first, end = min(look.start for look in held.looks), max(look.end for look in held.looks)
        inside = self.place.start <= first and end <= self.place.start + self.place.num_bytes
        return inside and _is_whole(self.frame)

    def tells(self, flat: Tensor) -> bool:
        """Whether it has the bytes that ``flat``, all of the storage on the CPU, has in its place now."""
        if self.sure:
            return True
        start, end = self.place.start, self.place.start + self.place.num_bytes
        found = decode(self.frame.buffer[: self.frame.num_bytes])
        if found is None or end > flat.nbytes or span_bytes(found) != self.place.num_bytes:
            return False
        then = found.as_strided((self.place.num_bytes // found.itemsize,), (1,))
        return _same(_bytes(then), _bytes(flat)[start:end])


def _is_whole(frame: Frame) -> bool:
    """Whether a frame has every byte of its tensor's memory: no gaps, no bitmap elsewhere, no loss."""
    header = read_header(frame.buffer)
    whole = header.dtype is not None and not header.flags and header.codec in CODECS
    return whole and header.geometry.order == "dense"


def _bytes(row: Tensor) -> np.ndarray:
    return row.view(torch.uint8).numpy()


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two rows of bytes are the same: words of eight at a time, then the rest."""
    end = len(a) & -8
    words = np.array_equal(a[:end].view(np.uint64), b[:end].view(np.uint64))
    return words and np.array_equal(a[end:], b[end:])
