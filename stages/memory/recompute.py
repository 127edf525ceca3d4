"""Recomputation: what a forward saved is dropped, and the forward runs once more before its backward.

The graph of the first run stays, and with it every edge, hook and order of summation; only the tensors that
it saved are forgotten. The second run saves the same ones in the same order, so their number tells which is
which. Same bits: layers are seeded one by one, what entered is kept as it was, buffers are read as they were
and left as they are. Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
"""
# ruff: noqa: D102 (methods are those of KeepOnDevice)

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from ...compression.errors import StageError
from ..torch_private import preserve_version_counter, version_of
from .activations import KeepOnDevice, Recompute
from .saved_storage import refuse_written
from .saved_tensor_hooks import ParameterFilter

Look = tuple[torch.dtype, torch.Size, tuple[int, ...]]


class RecomputedActivations(KeepOnDevice):
    """Saved tensors of the micro-batches of one stage, recomputed when their backwards come.

    Args:    parameters: tells the stage's parameters and buffers, which pass through untouched.
             buffers: those of the stage, which layers may write to."""

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
        """The first run is over: keep as they were only the buffers that it wrote to, counted by torch or
        not."""
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
