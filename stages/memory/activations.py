"""Saved tensors of a stage: hooks on what autograd saves, which stays, or is on its way to a store and back.

The hooks see weights and scalars too: what pays is a storage of some size that the forward made. In doubt a
tensor passes through, which is always right."""
# ruff: noqa: D102 (methods are those of KeepOnDevice)

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...compression.buffers import Pool
from ..torch_private import base_of, is_functorch_wrapped, memory_id, saved_tensors_hooks, version_of
from ..tracing.layers import Layer
from .packer import LayerAwareCompressor, Modules, SavedCounts, SavedTensorPacker
from .parameter_offload import OffloadedParameters
from .prefetch import MemoryThread, SavedRun, SentFrames
from .saved_storage import SavedStorage, WriteCounter, is_elements, refuse_written, view_of
from .stores import Store

Took = Callable[[SavedStorage], None]
Read = Callable[[SavedStorage, int, WriteCounter], Tensor]
_PART = 8  # a tensor that looks into less than this part of its storage leaves it where it is
# What autograd calls the views of a tensor and its cast: behind them, a weight is still the weight.
_PASSED_ON = frozenset(
    f"{name}Backward{number}"
    for name in (
        "ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "AsStrided",
        "Expand", "Squeeze", "Unsqueeze", "Slice", "Select", "Split", "SplitWithSizes", "Unbind", "Unflatten",
    )
    for number in range(2)
)  # fmt: skip


class ParameterFilter:
    """Tells parameters, buffers and their casts from what the forward makes; in doubt it is a parameter."""

    def __init__(self, keep: Iterable[Tensor], offloaded: OffloadedParameters | None = None) -> None:
        """``keep``: tensors that pass through, with everything in their memory and frozen ones' casts."""
        known = [tensor for tensor in keep if tensor.layout is torch.strided]
        found = [StorageWeakRef(tensor.untyped_storage()) for tensor in known]
        self._storages = {reference.cdata: reference for reference in found}  # so no other gets its number
        self._shapes = {tuple(tensor.shape) for tensor in known}
        self._offloaded = offloaded

    def also(self, keep: Iterable[Tensor]) -> ParameterFilter:
        """Return the filter that lets those through too."""
        more = ParameterFilter(keep, self._offloaded)
        more._storages |= self._storages
        more._shapes |= self._shapes
        return more

    def holds(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is one of them."""
        if self._offloaded is not None and self._offloaded.holds(tensor):
            return True
        base = base_of(tensor)
        if (base.is_leaf and base.requires_grad) or memory_id(tensor) in self._storages:
            return True
        if base.is_leaf:  # autocast casts frozen weights outside the graph
            return tensor.dtype in (torch.bfloat16, torch.float16) and tuple(base.shape) in self._shapes
        # a cast or view of a leaf: autocast saves its own copies of the weights
        function = tensor.grad_fn
        while function is not None and function.name() in _PASSED_ON:
            function = function.next_functions[0][0]
        return function is not None and function.name() == "torch::autograd::AccumulateGrad"

    def untouched(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return what autograd keeps for a tensor that passes through: the call that gives it back."""
        if self._offloaded is not None and self._offloaded.holds(tensor):
            if not (tensor.is_conj() or tensor.is_neg()):
                return self._offloaded.saved(tensor)
        return _untouched(tensor)


class SavedTensorHooks:
    """The saved-tensor hooks of one forward, or of several that nobody tells apart."""

    def __init__(
        self, packer: SavedTensorPacker, parameters: ParameterFilter, *, min_bytes: int, took: Took,
        read: Read | None = None,
    ) -> None:  # fmt: skip
        """Leave ``parameters`` and storages of fewer than ``min_bytes`` bytes as they are; call ``took`` with
        every other one, and ``read`` for its saved tensors, in the place of the packer's own."""
        self._read = read or packer.read
        self._packer, self._parameters, self._min_bytes = packer, parameters, min_bytes
        self._took = took
        self.layer: Layer | None = None  # which runs now, as far as anybody knows
        self._storages: weakref.WeakValueDictionary[int, SavedStorage] = weakref.WeakValueDictionary()
        self._latest: Callable[[], SavedStorage | None] = lambda: None
        self._lock = threading.RLock()  # a GPU's backward saves, for a second one, in a thread of its own

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """The block in which autograd saves through these hooks."""
        return saved_tensors_hooks(self._pack, operator.call)

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Return what autograd keeps in the place of ``tensor``: the call that gives it back."""
        is_plain = type(tensor) is Tensor and not is_functorch_wrapped(tensor) and is_elements(tensor)
        if not is_plain or self._parameters.holds(tensor):
            return self._parameters.untouched(tensor)
        memory = tensor.untyped_storage()
        with self._lock:
            storage = self._storages.get(memory_id(memory))
            if storage is not None and storage.same_memory(memory) and storage.writes.counts(tensor):
                return SavedRead(self._read, storage, storage.add(tensor, self.layer), WriteCounter(tensor))
            num_bytes = memory.nbytes()
            if num_bytes < self._min_bytes or view_of(tensor).num_bytes * _PART < num_bytes:
                return _untouched(tensor)
            stream, tiers = self._packer.stream(tensor.device), self._packer.store.tiers
            storage = SavedStorage(tensor, stream=stream, previous=self._latest, tiers=tiers)
            read = SavedRead(self._read, storage, storage.add(tensor, self.layer), WriteCounter(tensor))
            self._storages[memory_id(memory)], self._latest = storage, weakref.ref(storage)
        self._took(storage)
        return read


@dataclasses.dataclass(slots=True, eq=False)
class SavedRead:
    """Callable that autograd keeps for a tensor that may leave, and that gives it back."""

    read: Read
    storage: SavedStorage | None
    number: int
    writes: WriteCounter

    def __call__(self) -> Tensor:
        """The tensor; one without elements where it was given up."""
        return torch.empty(0) if self.storage is None else self.read(self.storage, self.number, self.writes)

    def give_up(self) -> None:
        """Nobody asks for it any more, whoever calls."""
        storage, self.storage = self.storage, None
        if storage is not None:
            storage.give_up(self.number)


def _untouched(tensor: Tensor) -> Callable[[], Tensor]:
    # Without its graph, which would hold itself for ever.
    return functools.partial(_unchanged, tensor.detach(), version_of(tensor))


def _unchanged(tensor: Tensor, version: int) -> Tensor:
    refuse_written(version, version_of(tensor))
    return tensor


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
