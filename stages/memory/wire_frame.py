"""Frames of the wire that may stand for what was saved: whose bytes they have, and whether they still do.

A frame belongs to the storage of its value, known by a reference that keeps its identity: an address is given
to another storage as soon as its own is freed.
Source: claims A8-A10 of CN115016937A (one module packs on every path out of a stage)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...compression.buffers import Frame
from ...compression.codec import CODECS, decode
from ...compression.frame import read_header
from .saved_storage import SavedStorage, TensorView, view_of


def place(tensor: Tensor) -> tuple[StorageWeakRef, TensorView]:
    """Return the storage where ``tensor`` lies now, and how it lies there."""
    return StorageWeakRef(tensor.untyped_storage()), view_of(tensor)


class WireFrame(NamedTuple):
    """A frame, and the storage and view of the tensor that it was made from or became.

    ``exact``: it was made from what is there now; else a layer may have written there since, and nothing
    counts what it writes through ``.data`` or NumPy."""

    frame: Frame
    storage: StorageWeakRef  # while this lives, its number is not given to another
    view: TensorView
    exact: bool

    def covers(self, saved: SavedStorage) -> bool:
        """Whether it has everything that the graph reads of ``saved``, as it was when the frame was made."""
        if self.storage.cdata != saved.original.cdata:
            return False
        first, end = min(view.start for view in saved.views), max(view.end for view in saved.views)
        return self.view.start <= first and end <= self.view.end and _is_whole(self.frame)

    def matches(self, flat: Tensor) -> bool:
        """Whether it has the bytes that ``flat``, all of the storage on the CPU, has in its place now."""
        if self.exact:
            return True
        found = decode(self.frame.buffer[: self.frame.num_bytes])
        if found is None or self.view.end > flat.nbytes or view_of(found).num_bytes != self.view.num_bytes:
            return False
        then = found.as_strided((self.view.num_bytes // found.itemsize,), (1,))
        return _same(_bytes(then), _bytes(flat)[self.view.start : self.view.end])


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
