"""What a stage's forward saved leaves when its layer is done, and is back before the layer's backward.

The walk of the forward says which layer saves, autograd which one reads; the memory thread moves. After the
forward comes ``offload``, before the backward ``ready``, after it ``drop``. What was packed for the wire is
not packed again. Source: claims A5, A6 and A8-A10 of CN115016937A (unload after the forward,
fetch before the backward).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from ...compression.buffers import Pool
from ..tracing.layers import Layer
from .layer_codecs import LayerAwareCompressor, Modules
from .packer import Counters, Counts, SavedTensorPacker
from .prefetch import MemoryThread, SavedRun, Went
from .saved_storage import SavedStorage, WriteCounter
from .saved_tensor_hooks import ParameterFilter, SavedTensorHooks
from .stores import Store


class NoOffload(Counters):
    """Saved tensors stay on the device, as autograd keeps them: ``SavedActivations`` without its work."""

    _counts = Counts()
    _block = contextlib.nullcontext()

    def forward(
        self, micro_batch: int, keep: Iterable[Tensor] = ()
    ) -> contextlib.AbstractContextManager[None]:
        """Enter no hooks."""
        return self._block

    def repeats(self, micro_batch: int, again: Any) -> None:
        """Do nothing: no forward runs again."""

    def layer_done(self, done: Layer | None, following: Layer | None) -> None:
        """Do nothing: nothing is kept by layer."""

    def offload(self, micro_batch: int, went: Went) -> None:
        """Do nothing: tensors stay on the device."""

    def fetch(self, micro_batch: int) -> None:
        """Do nothing: tensors are on the device."""

    def ahead(self, micro_batch: int) -> None:
        """Do nothing: tensors are on the device."""

    def ready(self, micro_batch: int) -> None:
        """Do nothing: tensors are on the device."""

    def drop(self, micro_batch: int) -> None:
        """Do nothing: autograd frees what it saved."""

    def wait(self) -> None:
        """Do nothing: no tensor is being moved."""

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


class SavedActivations(Counters):
    """What the micro-batches of one stage save, on its way to a store and back."""

    def __init__(
        self,
        store: Store,
        *,
        keep: Iterable[Tensor],
        codec: str,
        min_bytes: int,
        modules: Modules,
        stage: int = 0,
        thread: MemoryThread | None = None,
        parameters: ParameterFilter | None = None,
    ) -> None:
        """Save into ``store``, packed with ``codec``.

        Args:    keep: the stage's parameters and buffers, which pass through untouched; ``parameters``: what
                 tells them, where they come and go.
                 min_bytes: smaller storages pass through too.
                 modules: those that the stage's layers call, by path: what they prove is used.
                 thread: that of the rank, which knows when what was saved is read; None: one of its own, for
                 which all of it is far away until it is fetched.
        """
        self._packer = SavedTensorPacker(store, codec=codec, pool=store.pool() or Pool(), num_ahead=0)
        self._counts = self._packer
        self._parameters, self._min_bytes = parameters or ParameterFilter(keep), min_bytes
        self._compressor = LayerAwareCompressor(modules)
        self._stage, self._thread = stage, thread or MemoryThread()
        self._micro_batches: dict[int, SavedRun] = {}
        self._numbers: dict[Layer | None, int] = {}
        self._run: SavedRun | None = None  # of the forward that runs
        self._hooks: SavedTensorHooks | None = None

    @contextlib.contextmanager
    def forward(self, micro_batch: int, keep: Iterable[Tensor] = ()) -> Iterator[None]:
        """The block in which the layers of ``micro_batch`` run.

        Args:    keep: tied parameters of other stages among them."""
        run = self._run = self._micro_batches[micro_batch] = SavedRun(
            self._stage,
            micro_batch,
            numbers=self._numbers,
            packer=self._packer,
            compressor=self._compressor,
        )
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

    def repeats(self, micro_batch: int, again: Any) -> None:
        """Do nothing: no forward runs again."""

    def layer_done(self, done: Layer | None, following: Layer | None) -> None:
        """Take note that ``done`` has saved all that it will, and that ``following`` saves from here on.

        The walk of a forward says so before the first layer, between two, and after the last (None): what
        was saved is known by layer, and leaves by layer."""
        hooks, run = self._hooks, self._run
        assert hooks is not None, "layers run inside of a forward"
        assert run is not None
        assert hooks.layer is done, "layers are done in the order in which they began"
        hooks.layer = following
        if following is not None:
            number = self._numbers.setdefault(following, len(self._numbers))
            self._thread.layer_begins(run, number)

    def offload(self, micro_batch: int, went: Went) -> None:
        """The forward of ``micro_batch`` is over, what it saved may leave; waits where the packing is behind.

        Args:    went: by number, tensors that were sent and their frames, which the store holds in place of
                 frames of its own."""
        self._check()
        self._micro_batches[micro_batch].close(went)
        self._thread.closed()

    def fetch(self, micro_batch: int) -> None:
        """Begin to bring back what ``micro_batch`` saved, last saved first, whenever it is read."""
        references, run = [], self._micro_batches[micro_batch]
        run.wanted = True
        for storage in run.alive():
            storage.transition("resident", only_from="leaving")
            if storage.transition("coming", only_from="away"):
                references.append(weakref.ref(storage))
        self._packer.bring(references)

    def ahead(self, micro_batch: int) -> None:
        """Do nothing: the memory thread knows which backward is next."""

    def ready(self, micro_batch: int) -> None:
        """A backward begins, which brings back itself what is not there; raises what a thread raised."""
        self._check()

    def drop(self, micro_batch: int) -> None:
        """Forget what ``micro_batch`` saved: after its backward, or when the step failed."""
        run = self._micro_batches.pop(micro_batch, None)
        if run is not None:
            self._thread.remove(run)
            run.drop()

    def _check(self) -> None:
        self._packer.check()
        self._thread.check()

    def close(self) -> None:
        """Drop everything and end the threads."""
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
        """A backward reads a saved tensor: so far it has come."""
        layer = run.number(storage.views[number].layer)
        if layer != run.reading:
            self._thread.reads(run, layer)
        return self._packer.read(storage, number, writes)
