"""What one micro-batch saved on a stage: its storages, which of them are still to leave, and which have left.

The training thread adds, the memory thread moves: what they share is changed by one call each."""

from __future__ import annotations

import bisect
import functools
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, fx

from ...compression.pool import Frame
from ..tracing.layers import Layer
from .layer_aware import LayerAwareCompressor
from .packer import SavedTensorPacker
from .saved_storage import SavedStorage
from .wire_frame import WireFrame, place

Entered = Mapping[int, Any]
Came = Mapping[int, Frame]
Went = Mapping[int, tuple[Tensor, Frame]]
Numbers = Mapping[Layer | None, int]


class Left(NamedTuple):
    """A storage that was given to the packer, and the number of the layer that reads it first."""

    layer: int
    storage: weakref.ref[SavedStorage]
    key: object


class SavedRun:
    """The saved tensors of one forward, from its first layer to the end of its backward.

    ``waiting`` are those that have not left, in the order of saving; ``left`` the others by layer, which only
    the memory thread changes. ``reading``: the layer whose backward runs, by number. ``closed``: the forward
    is over; ``wanted``: all of it is to be in memory."""

    def __init__(
        self,
        stage: int,
        micro_batch: int,
        *,
        entered: Entered,
        numbers: Numbers,
        packer: SavedTensorPacker,
        compressor: LayerAwareCompressor,
    ) -> None:
        """``entered``: the values by number, as the layers get them; ``numbers``: of the stage's layers."""
        self.stage, self.micro_batch = stage, micro_batch
        self.packer, self._compressor, self._numbers = packer, compressor, numbers
        self._entered = {n: place(item) for n, item in entered.items() if isinstance(item, Tensor)}
        self._came = {storage.cdata for storage, _ in self._entered.values()}
        self._keys: deque[object] = deque()
        self._wires: dict[object, WireFrame] = {}
        self.waiting: dict[object, weakref.ref[SavedStorage]] = {}
        self.left: list[Left] = []
        self._sizes: dict[fx.Node, tuple[int, ...]] = {}  # of the floats that a layer saved
        self.reading = -1
        self.lock = threading.Lock()  # what the memory thread decides, and the end of it all
        self.closed = self.wanted = False

    def add(self, storage: SavedStorage) -> None:
        """A storage whose first tensor was saved now."""
        self._keys.append(storage.key)
        self.waiting[storage.key] = weakref.ref(storage)

    def added(self, tensor: Tensor, layer: Layer | None) -> None:
        """``layer`` saved ``tensor``, which is to leave."""
        if layer is not None and tensor.is_floating_point():
            self._sizes[layer.node] = tuple(tensor.size())

    def close(self, came: Came, went: Went) -> None:
        """The forward is over; these frames hold what entered, and what went out since: the newer first."""
        frames = [WireFrame(frame, *place(item), exact=True) for item, frame in went.values()]
        frames += [WireFrame(came[n], *at, exact=False) for n, at in self._entered.items() if n in came]
        for storage in self.alive() if frames else ():
            wire = next((frame for frame in frames if frame.covers(storage)), None)
            if wire is not None:
                wire.frame.hold()
                self._wires[storage.key] = wire
        self.closed = True

    def staying(self) -> list[SavedStorage]:
        """Those that have not left and that the graph still holds, in the order of saving."""
        found = [reference() for reference in self.waiting.copy().values()]
        return [storage for storage in found if storage is not None]

    def may_leave(self, storage: SavedStorage) -> bool:
        """Whether nobody needs ``storage`` in memory but the backward.

        During the forward only what nothing else holds: nobody can write to it any more, and its memory is
        freed. What came in waits for its frame."""
        return self.closed or (storage.original.cdata not in self._came and storage.alone)

    def first_read(self, storage: SavedStorage) -> int:
        """The number of the last layer that saved a part of ``storage``: its backward comes first."""
        return max(self._numbers.get(view.layer, 0) for view in list(storage.views))

    def number(self, layer: Layer | None) -> int:
        """The number of a layer of the stage, in running order."""
        return self._numbers.get(layer, 0)

    def leave(self, storage: SavedStorage, layer: int) -> None:
        """Give ``storage``, which ``layer`` reads first, to the packer."""
        del self.waiting[storage.key]
        if not storage.transition("leaving", only_from="resident"):
            return
        compress = functools.partial(self._compressor.compress, inputs=self._sizes)
        wire = self._wires.pop(storage.key, None)
        bisect.insort(self.left, Left(layer, weakref.ref(storage), storage.key), key=lambda one: one.layer)
        self.packer.queue(storage, wire=wire, compress=compress)
        if wire is not None:
            wire.frame.release()  # the packer has its own hold

    def forget_read(self) -> None:
        """Let the store forget what the backward has read and the graph let go of, last layers first."""
        while self.left and self.left[-1].storage() is None:
            self.packer.store.drop(self.left.pop().key)

    def alive(self) -> list[SavedStorage]:
        """The storages that the graph still holds, in the order of a backward."""
        found = [one.storage() for one in reversed(list(self.left))]
        return [*reversed(self.staying()), *(storage for storage in found if storage is not None)]

    def drop(self) -> None:
        """Forget everything: after the backward, or when the step failed."""
        with self.lock:
            for storage in self.alive():
                storage.transition("dropped")
            for key in self._keys:
                self.packer.store.drop(key)
        wires, self._wires = self._wires, {}
        for wire in wires.values():
            wire.frame.release()
