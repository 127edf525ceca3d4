"""Saved tensors of a stage: on the device, or on their way to a store and back."""
# ruff: noqa: D102 (methods are those of KeepOnDevice)

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterable, Iterator

from torch import Tensor

from ...compression.buffers import Pool
from ..torch_private import saved_tensors_hooks
from ..tracing.layers import Layer
from .packer import LayerAwareCompressor, Modules, SavedCounts, SavedTensorPacker
from .prefetch import MemoryThread, SavedRun, SentFrames
from .saved_storage import SavedStorage, WriteCounter
from .saved_tensor_hooks import ParameterFilter, SavedTensorHooks
from .stores import Store


class KeepOnDevice:
    """Saved tensors stay on the device; of offloaded ``parameters`` autograd keeps notes."""

    def __init__(self, parameters: ParameterFilter | None = None) -> None:
        self._parameters, self.counts = parameters, SavedCounts()

    def forward(
        self, micro_batch: int, keep: Iterable[Tensor] = ()
    ) -> contextlib.AbstractContextManager[None]:
        """Return the block in which the layers run, which read tied parameters of other stages (``keep``)."""
        if self._parameters is None:
            return contextlib.nullcontext()
        return saved_tensors_hooks(self._parameters.untouched, operator.call)

    def offload(self, micro_batch: int, sent: SentFrames) -> None:
        """The forward of ``micro_batch`` is over, what it saved may leave; waits where packing is behind.
        ``sent``: tensors that were sent and their frames by number, which need not be packed again."""

    def ready(self, micro_batch: int) -> None:
        """A backward of ``micro_batch`` begins."""

    def halfway(self, micro_batch: int) -> None:
        """The first half of a backward is over, and the second comes later."""

    def drop(self, micro_batch: int) -> None:
        """Forget what ``micro_batch`` saved: after its backward, or when the step failed."""

    def close(self) -> None:
        """Drop everything and end the threads."""


class SavedActivations(KeepOnDevice):
    """Saved tensors of a stage, evicted when their layer is done and back before the layer's backward.

    The walk of the forward says which layer saves, autograd which one reads; the memory thread moves."""

    def __init__(
        self, store: Store, *, parameters: ParameterFilter, codec: str, min_bytes: int, modules: Modules,
        stage: int = 0, thread: MemoryThread | None = None,
    ) -> None:  # fmt: skip
        """Save storages of ``min_bytes`` or more into ``store``, packed with ``codec``, but for
        ``parameters`` and buffers. ``modules``: those that the stage's layers call; ``thread``: that of the
        rank."""
        self._packer = SavedTensorPacker(store, codec=codec, pool=store.pool() or Pool(), num_ahead=0)
        self.counts, self._parameters, self._min_bytes = self._packer.counts, parameters, min_bytes
        self._compressor = LayerAwareCompressor(modules)
        self._stage, self._thread = stage, thread or MemoryThread()
        self._micro_batches: dict[int, SavedRun] = {}
        self._run: SavedRun | None = None  # of the forward that runs
        self._hooks: SavedTensorHooks | None = None

    @contextlib.contextmanager
    def forward(self, micro_batch: int, keep: Iterable[Tensor] = ()) -> Iterator[None]:
        run = SavedRun(self._stage, micro_batch, packer=self._packer, compressor=self._compressor)
        self._run = self._micro_batches[micro_batch] = run
        self._hooks = SavedTensorHooks(
            self._packer,
            self._parameters.also(keep),
            min_bytes=self._min_bytes,
            took=functools.partial(self._took, run),
            read=functools.partial(self._read, run),
        )
        self._thread.add(run)
        try:
            with self._hooks.entered():
                yield
        finally:
            self._hooks = self._run = None

    def layer_done(self, done: Layer | None, following: Layer | None) -> None:
        """Take note that ``done`` has saved all that it will, and that ``following`` saves from here on."""
        hooks, run = self._hooks, self._run
        assert hooks is not None, "layers run inside of a forward"
        assert run is not None
        assert hooks.layer is done, "layers are done in the order in which they began"
        hooks.layer = following
        if following is not None:
            self._thread.layer_begins(run, run.begins(following))

    def offload(self, micro_batch: int, sent: SentFrames) -> None:
        self.ready(micro_batch)
        self._micro_batches[micro_batch].close(sent)
        self._thread.closed()

    def ready(self, micro_batch: int) -> None:
        """Raise what a thread raised; a backward brings back itself what is not there."""
        self._packer.check()
        self._thread.check()

    def drop(self, micro_batch: int) -> None:
        if (run := self._micro_batches.pop(micro_batch, None)) is not None:
            self._thread.remove(run)
            run.drop()

    def close(self) -> None:
        for micro_batch in list(self._micro_batches):
            self.drop(micro_batch)
        self._thread.close()
        self._packer.close()

    def wait(self) -> None:
        """Wait until everything that was to move has moved, for those who count."""
        self._thread.drain()
        self._packer.drain()

    def _took(self, run: SavedRun, storage: SavedStorage) -> None:
        run.add(storage)
        self._thread.saved(storage.num_bytes)

    def _read(self, run: SavedRun, storage: SavedStorage, number: int, writes: WriteCounter) -> Tensor:
        layer = run.number(storage.views[number].layer)
        if layer != run.reading:
            self._thread.reads(run, layer)
        if storage.state == "offloaded":
            self._thread.asked_for(run, storage)
        return self._packer.read(storage, number, writes)
