"""What a stage's forward saved leaves when the micro-batch has gone on, and is back before its backward.

The program says when: after the forward ``offload``, ahead of the backward ``fetch``, before it ``ready``,
after it ``drop``; the walk of the forward says which layer saves. What was packed for the wire, or came
packed, is not packed again.
Source: claims A5, A6 and A8-A10 of CN115016937A (unload after the forward, fetch before the backward).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ...compression.pool import Frame, Pool
from ..tracing.layers import Layer
from .hooks import ParameterFilter, SavedTensorHooks
from .layer_aware import LayerAwareCompressor, Modules
from .packer import Counters, SavedTensorPacker, bring_fetched
from .saved_storage import SavedStorage
from .store import Store
from .wire_frame import WireFrame, place

Entered = Mapping[int, Any]
Came = Mapping[int, Frame]
Went = Mapping[int, tuple[Tensor, Frame]]


class NoOffload:
    """Saved tensors stay on the device, as autograd keeps them: ``SavedActivations`` without its work."""

    bytes_raw = bytes_kept = num_packs = num_unpacks = 0
    _block = contextlib.nullcontext()

    def forward(
        self, micro_batch: int, entered: Entered, keep: Iterable[Tensor] = ()
    ) -> contextlib.AbstractContextManager[None]:
        """Enter no hooks."""
        return self._block

    def repeats(self, micro_batch: int, again: Any) -> None:
        """Do nothing: no forward runs again."""

    def layer_done(self, done: Layer | None, following: Layer | None) -> None:
        """Do nothing: nothing is kept by layer."""

    def offload(self, micro_batch: int, came: Came, went: Went) -> None:
        """Do nothing: tensors stay on the device."""

    def fetch(self, micro_batch: int) -> None:
        """Do nothing: tensors are on the device."""

    def ready(self, micro_batch: int) -> None:
        """Do nothing: tensors are on the device."""

    def drop(self, micro_batch: int) -> None:
        """Do nothing: autograd frees what it saved."""

    def wait(self) -> None:
        """Do nothing: no tensor is being moved."""

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


class _MicroBatch:
    """What one micro-batch saved: its storages by layer, their keys, and where what came in lies."""

    def __init__(self, entered: Mapping[int, Any]) -> None:
        self.entered = {n: place(item) for n, item in entered.items() if isinstance(item, Tensor)}
        self.layers: dict[Layer | None, list[weakref.ref[SavedStorage]]] = {}  # None: not known
        self.keys: list[object] = []

    def add(self, storage: SavedStorage) -> None:
        """Add a storage whose first tensor was saved now."""
        self.layers.setdefault(storage.views[0].layer, []).append(weakref.ref(storage))
        self.keys.append(storage.key)

    def alive(self) -> list[SavedStorage]:
        """Return the storages that the graph still holds, layer by layer."""
        references = itertools.chain(*self.layers.values())
        return [storage for reference in references if (storage := reference()) is not None]

    def frames(self, came: Came, went: Went) -> list[WireFrame]:
        """Return the frames of the values that came in and went out: the newer ones first."""
        made = [WireFrame(frame, *place(tensor), exact=True) for tensor, frame in went.values()]
        return made + [WireFrame(came[n], *at, exact=False) for n, at in self.entered.items() if n in came]


class SavedActivations(Counters):
    """What the micro-batches of one stage save, on its way to a store and back."""

    def __init__(
        self, store: Store, *, keep: Iterable[Tensor], codec: str, min_bytes: int, modules: Modules,
        parameters: ParameterFilter | None = None,
    ) -> None:  # fmt: skip
        """Save into ``store``, packed with ``codec``.

        Args:    keep: the stage's parameters and buffers, which pass through untouched; ``parameters``: what
                 tells them, where they come and go.
                 min_bytes: smaller storages pass through too.
                 modules: those that the stage's layers call, by path: what they prove is used.
        """
        self._packer = SavedTensorPacker(store, codec=codec, pool=Pool(), num_ahead=0)
        self._parameters, self._min_bytes = parameters or ParameterFilter(keep), min_bytes
        self._compressor = LayerAwareCompressor(modules)
        self._micro_batches: dict[int, _MicroBatch] = {}
        self._hooks: SavedTensorHooks | None = None  # of the forward that runs

    @contextlib.contextmanager
    def forward(self, micro_batch: int, entered: Entered, keep: Iterable[Tensor] = ()) -> Iterator[None]:
        """The block in which the layers of ``micro_batch`` run.

        Args:    entered: the values by number, as the layers get them.
                 keep: tied parameters of other stages among them."""
        run = self._micro_batches[micro_batch] = _MicroBatch(entered)
        parameters = self._parameters.also(keep)
        self._hooks = SavedTensorHooks(self._packer, parameters, min_bytes=self._min_bytes, took=run.add)
        try:
            with self._hooks.entered():
                yield
        finally:
            self._hooks = None

    def repeats(self, micro_batch: int, again: Any) -> None:
        """Do nothing: no forward runs again."""

    def layer_done(self, done: Layer | None, following: Layer | None) -> None:
        """Take note that ``done`` has saved all that it will, and that ``following`` saves from here on.

        The walk of a forward says so before the first layer, between two, and after the last (None): what was
        saved is known by layer, and may move by layer."""
        assert self._hooks is not None, "layers run inside of a forward"
        assert self._hooks.layer is done, "layers are done in the order in which they began"
        self._hooks.layer = following

    def offload(self, micro_batch: int, came: Came, went: Went) -> None:
        """Begin to move what the forward of ``micro_batch`` saved; waits where the packing is behind.

        What these frames have is not packed again, the store holds the same frame.

        Args:    came: by number, the frames of values that entered.
                 went: by number, tensors and the frames that were made of them since."""
        self._packer.check()
        run = self._micro_batches[micro_batch]
        storages, frames = run.alive(), run.frames(came, went)
        views = [view for storage in storages for view in storage.views if view.dtype.is_floating_point]
        inputs = {view.layer.node: view.size for view in views if view.layer is not None}
        compress = functools.partial(self._compressor.compress, inputs=inputs)
        for storage in storages:
            wire = next((frame for frame in frames if frame.covers(storage)), None)
            self._packer.offload(storage, wire=wire, compress=compress)

    def fetch(self, micro_batch: int) -> None:
        """Begin to bring back what ``micro_batch`` saved, last saved first; returns at once."""
        storages = self._keep(micro_batch)
        for storage in storages:
            storage.transition("coming", only_from="away")
        references = [weakref.ref(storage) for storage in storages]
        self._packer.io.submit_first(functools.partial(bring_fetched, references))

    def ready(self, micro_batch: int) -> None:
        """Wait until everything that ``micro_batch`` saved is in memory; raises what a thread raised."""
        for storage in self._keep(micro_batch):
            storage.bring()
        self._packer.check()

    def drop(self, micro_batch: int) -> None:
        """Forget what ``micro_batch`` saved: after its backward, or when the step failed."""
        run = self._micro_batches.pop(micro_batch, None)
        if run is not None:
            for storage in run.alive():
                storage.transition("dropped")
            for key in run.keys:
                self._packer.store.drop(key)

    def close(self) -> None:
        """Drop everything and end the threads."""
        for micro_batch in list(self._micro_batches):
            self.drop(micro_batch)
        self._packer.close()

    def wait(self) -> None:
        """Wait until everything that was to leave has left, for those who count."""
        self._packer.drain()

    def _keep(self, micro_batch: int) -> list[SavedStorage]:
        """What has not left yet need not; returns all storages, in the order of a backward."""
        storages = self._micro_batches[micro_batch].alive()[::-1]
        for storage in storages:
            storage.transition("resident", only_from="leaving")
        return storages
