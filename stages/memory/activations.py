"""Saved tensors of a stage: on the device, on their way to a store and back, or computed once more."""
# ruff: noqa: D102 (methods are those of KeepOnDevice)

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ...compression.buffers import Pool
from ...compression.errors import StageError
from ..torch_private import preserve_version_counter, version_of
from ..tracing.layers import Layer
from .packer import LayerAwareCompressor, Modules, SavedCounts, SavedTensorPacker
from .prefetch import MemoryThread, SavedRun, SentFrames
from .saved_storage import SavedStorage, WriteCounter, refuse_written
from .saved_tensor_hooks import ParameterFilter, SavedTensorHooks
from .stores import Store

Look = tuple[torch.dtype, torch.Size, tuple[int, ...]]


class Recompute(NamedTuple):
    """``run`` runs the layers of a forward again, with ``tied`` parameters of other stages."""

    run: Callable[[], None]
    tied: Sequence[Tensor]


class KeepOnDevice:
    """Saved tensors stay on the device; of offloaded ``parameters`` autograd keeps notes."""

    def __init__(self, parameters: ParameterFilter | None = None) -> None:
        self._parameters, self.counts = parameters, SavedCounts()

    def forward(
        self, micro_batch: int, keep: Iterable[Tensor] = (), recompute: Recompute | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Return the block in which the layers run, which read tied parameters of other stages (``keep``)."""
        if self._parameters is None:
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._parameters.untouched, operator.call)

    def offload(self, micro_batch: int, sent: SentFrames) -> None:
        """The forward of ``micro_batch`` is over, what it saved may leave; waits where packing is behind.
        ``sent``: tensors that were sent and their frames by number, which need not be packed again."""

    def ready(self, micro_batch: int) -> None:
        """A backward of ``micro_batch`` begins."""

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
    def forward(
        self, micro_batch: int, keep: Iterable[Tensor] = (), recompute: Recompute | None = None
    ) -> Iterator[None]:
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


class RecomputedActivations(KeepOnDevice):
    """Saved tensors of a stage that are dropped, and saved anew when the forward runs again for its backward.

    The graph of the first run stays, with every edge, hook and order of summation. The second run saves the
    same tensors in the same order, so their number tells which is which. Same bits: layers are seeded one by
    one, what entered is kept as it was, buffers are read as they were and left as they are. Source: Chen et
    al., Training Deep Nets with Sublinear Memory Cost, 2016."""

    def __init__(self, parameters: ParameterFilter, buffers: Iterable[Tensor]) -> None:
        super().__init__()
        self._filter, self._runs = parameters, dict[int, _Run]()
        self._buffers = [tensor for tensor in buffers if tensor.numel()]

    @contextlib.contextmanager
    def forward(
        self, micro_batch: int, keep: Iterable[Tensor] = (), recompute: Recompute | None = None
    ) -> Iterator[None]:
        assert recompute is not None, "what is not kept is made again"
        run = self._runs[micro_batch] = _Run(self._filter.also(keep), self._buffers)
        with torch.autograd.graph.saved_tensors_hooks(run.leave, operator.call):
            yield
        run.end(recompute)

    def ready(self, micro_batch: int) -> None:
        self._runs[micro_batch].recompute()

    def drop(self, micro_batch: int) -> None:
        self._runs.pop(micro_batch, None)


class _Run:
    """One forward: the geometry of the tensors that it saved, and from its second run on the tensors."""

    def __init__(self, parameters: ParameterFilter, buffers: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._forward: Callable[[], object] | None = None
        self._looks: list[Look] = []
        self._made: list[tuple[Tensor, int]] = []  # with torch's count of the writes to them
        with torch.no_grad():
            self._before = [(buffer, buffer.clone()) for buffer in buffers]

    def leave(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Autograd saves ``tensor`` in the first run; returns what it keeps in its place."""
        if self._parameters.holds(tensor):
            return self._parameters.untouched(tensor)
        self._looks.append(_look(tensor))
        return functools.partial(self._give, len(self._looks) - 1)

    def end(self, forward: Recompute) -> None:
        """The first run is over: keep as they were only the buffers that it wrote to."""
        self._forward, self._parameters = forward.run, self._parameters.also(forward.tied)
        self._before = [(b, was) for b, was in self._before if not _same(b, was)]

    def recompute(self) -> None:
        """The second run, with buffers as they were ahead of the first, and left as they are now."""
        if self._forward is None:
            _not_read(None)
        if self._made:
            return
        buffers = tuple(buffer for buffer, _ in self._before)
        with torch.no_grad():
            now = [buffer.clone() for buffer in buffers]
        with preserve_version_counter(buffers), torch.enable_grad():
            try:
                _fill(self._before)
                with torch.autograd.graph.saved_tensors_hooks(self._keep, _not_read):
                    self._forward()
            finally:
                _fill(list(zip(buffers, now, strict=True)))
        if len(self._made) != len(self._looks):
            raise _other(f"saved {len(self._made)} tensors", f"{len(self._looks)}")
        for made, version in self._made:
            refuse_written(version, version_of(made))

    def _keep(self, tensor: Tensor) -> None:
        if self._parameters.holds(tensor):
            return
        number = len(self._made)
        if number >= len(self._looks) or self._looks[number] != _look(tensor):
            before = self._looks[number][1] if number < len(self._looks) else "nothing"
            raise _other(f"saved a tensor of shape {tuple(tensor.shape)}", f"{before}")
        self._made.append((tensor.detach(), version_of(tensor)))

    def _give(self, number: int) -> Tensor:
        if not self._made:
            self.recompute()  # somebody asks ahead of the backward
        return self._made[number][0]


def _not_read(_: None) -> NoReturn:
    raise StageError("a backward ran inside a forward that runs again; take recompute=false for this stage")


def _look(tensor: Tensor) -> Look:
    return tensor.dtype, tensor.size(), tensor.stride() if tensor.layout is torch.strided else ()


def _same(a: Tensor, b: Tensor) -> bool:
    one, other = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a.detach(), b))
    return torch.equal(one, other)


def _fill(buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, content in buffers:
            buffer.copy_(content)


def _other(found: str, was: str) -> StageError:
    return StageError(
        f"a forward that runs again must do what it did, found that it {found}, and at first {was}; make its "
        "layers depend on their inputs alone, or take recompute=false for this stage"
    )
