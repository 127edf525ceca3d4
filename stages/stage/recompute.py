"""Saved tensors that are dropped, and saved anew when their layers run again for their backward.

The graph of the first run stays, with every edge, hook and order of summation. The second run saves the same
tensors in the same order, so their number tells which is which. Same bits: layers are seeded one by one, what
entered is kept as it was, buffers are read as they were and left as they are. Source: Chen et al., Training
Deep Nets with Sublinear Memory Cost, 2016."""
# ruff: noqa: D102 (methods are those of KeepOnDevice)

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ...compression.errors import StageError
from ..memory.activations import KeepOnDevice, ParameterFilter
from ..memory.saved_storage import Bytes, refuse_written, view_of
from ..torch_private import memory_id, preserve_version_counter, saved_tensors_hooks, version_of
from ..tracing.layers import Layer, Parts, is_local, part_of, tensors_read
from ..tracing.verify import same_bits
from .value_routing import Route, reads

Look = tuple[torch.dtype, torch.Size, tuple[int, ...]]


class Section(NamedTuple):
    """Layers of a stage that run again together; ``route`` has only them, ``changes`` are the values that
    enter and are written to by a layer, ``buffers`` those that they read."""

    route: Route
    changes: Sequence[int]
    buffers: Sequence[Tensor]


def sections(route: Route, parts: Parts, recompute: bool | Sequence[str]) -> dict[str, Section]:
    """By the name of its first layer, each section: all layers, or those of a part that is to run again."""
    found = {}
    for part, run in itertools.groupby(route.visits, lambda visit: part_of(visit.layer.module, recompute)):
        if part is None:
            continue
        visits = tuple(run)
        layers, own = [visit.layer for visit in visits], {visit.layer.node for visit in visits}
        read = (node for layer in layers for node in reads(layer))
        foreign = tuple(dict.fromkeys(node for node in read if node not in own and not is_local(node)))
        record = route.record
        entering = dict.fromkeys(n for node in foreign for n in record.outputs[node].values)
        alone = dataclasses.replace(
            route,
            visits=visits,
            foreign=foreign,
            inputs=tuple(entering),
            asks=tuple(n for n in entering if not record.values[n].parameter),
            tied=tuple(n for n in entering if record.values[n].parameter),
        )
        values = ((n, record.values[n]) for n in entering)
        changes = [n for n, v in values if v.freed or any(w != v.producer for w, _ in v.writers)]
        named = (tensor for layer in layers for _, tensor in tensors_read(layer.node, parts))
        buffers = {id(t): t for t in named if not isinstance(t, nn.Parameter) and t.numel()}
        found[layers[0].name] = Section(alone, changes, list(buffers.values()))
    return found


class Forward(NamedTuple):
    """A forward of a stage: its ``values`` by number as they are while it runs, its sections by their first
    layer, and what runs the layers of a route on values again."""

    values: Mapping[int, Any]
    sections: Mapping[str, Section]
    run: Callable[[dict[int, Any], Route], object]


class RecomputedActivations(KeepOnDevice):
    """Saved tensors of sections are dropped; of those that run again the last is there, and no other."""

    def __init__(self, parameters: ParameterFilter, written: Sequence[Tensor], *, ahead: bool) -> None:
        """``ahead``: all there is runs again as a backward begins, else a section when it is asked for.
        ``written``: the buffers to which forwards write, wherever."""
        super().__init__()
        self._filter, self._written, self._ahead = parameters, {id(b): b for b in written}, ahead
        self._memory: Collection[int] = ()  # of these
        self._runs = dict[int, list[_Run]]()
        self._hooks = contextlib.ExitStack()
        self._forward: Forward | None = None
        self._now: list[_Run] = []

    def begin(self, micro_batch: int, forward: Forward) -> None:
        """A forward comes."""
        self._now = self._runs[micro_batch] = []
        self._forward, self._memory = forward, {memory_id(buffer) for buffer in self._written.values()}

    @contextlib.contextmanager
    def forward(self, micro_batch: int, keep: Iterable[Tensor] = ()) -> Iterator[None]:
        try:
            with self._hooks:
                yield
        finally:
            self._forward = None

    def layer_done(self, done: Layer | None, following: Layer | None) -> None:
        """Between two layers: a section may end, or begin."""
        forward = self._forward
        assert forward is not None, "layers run inside of a forward"
        if self._now and done is self._now[-1].section.route.visits[-1].layer:
            self._hooks.close()
            self._now[-1].end(self._written)
        if following is not None and (section := forward.sections.get(following.name)) is not None:
            run = _Run(section, forward, self._filter, memory=self._memory, beside=self._now)
            self._now.append(run)
            self._hooks.enter_context(saved_tensors_hooks(run.leave, operator.call))

    def ready(self, micro_batch: int) -> None:
        if self._ahead:
            for run in self._runs[micro_batch]:
                run.recompute()

    def halfway(self, micro_batch: int) -> None:
        for run in self._runs[micro_batch] if not self._ahead else ():
            run.forget()

    def drop(self, micro_batch: int) -> None:
        self._runs.pop(micro_batch, []).clear()


class _Run:
    """A section that ran: what entered it, the geometry of what it saved, and from its second run on that.

    ``memory``: of buffers to which forwards write; ``beside``: all runs of the same forward."""

    def __init__(
        self, section: Section, forward: Forward, parameters: ParameterFilter, *,
        memory: Collection[int], beside: Sequence[_Run],
    ) -> None:  # fmt: skip
        self.section, self._again, self._beside = section, forward.run, beside
        entered = {n: forward.values[n] for n in section.route.inputs if n in forward.values}
        self._tied = {n: entered.pop(n) for n in section.route.tied if n in entered}
        # A layer may return a buffer, to which the forward of another micro-batch writes.
        of_buffers = (n for n, x in entered.items() if isinstance(x, Tensor) and memory_id(x) in memory)
        self._changes = [*section.changes, *of_buffers]
        self._entered = _copies(entered, self._changes)
        pairs = ((x, entered[n]) for n, x in self._entered.items() if isinstance(x, Tensor))
        self._versions = [
            (x, version_of(x))
            for x, was in pairs
            if x.layout is torch.strided and memory_id(x) == memory_id(was)
        ]
        self._parameters = parameters.also(self._tied.values())
        self._over = False
        self._looks: list[Look | None] = []  # None: of a parameter, which stays
        self._made: list[tuple[Tensor, int] | None] = []  # with torch's count of the writes to them
        with torch.no_grad():
            self._before = [(buffer, buffer.clone()) for buffer in section.buffers]

    def leave(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Autograd saves ``tensor`` in the first run; returns what it keeps in its place."""
        stays = self._parameters.holds(tensor)
        self._looks.append(None if stays else _look(tensor))
        if stays:
            return self._parameters.untouched(tensor)
        return functools.partial(self._give, len(self._looks) - 1)

    def end(self, written: Collection[int]) -> None:
        """The first run is over: keep as they were only the buffers that somebody writes to."""
        self._over = True
        self._before = [(b, was) for b, was in self._before if id(b) in written or not same_bits(b, was)]

    def forget(self) -> None:
        """Drop what the second run saved; it may run again."""
        self._made = []

    def recompute(self) -> None:
        """The second run, with buffers as they were ahead of the first, and left as they are now."""
        if not self._over:
            _not_read(None)
        if self._made:
            return
        for other in self._beside:
            other.forget()
        for item, version in self._versions:
            refuse_written(version, version_of(item))
        buffers = tuple(buffer for buffer, _ in self._before)
        with torch.no_grad():
            now = [buffer.clone() for buffer in buffers]
        with preserve_version_counter(buffers), torch.enable_grad():
            try:
                _fill(self._before)
                with saved_tensors_hooks(self._keep, _not_read):
                    self._again(_copies(self._entered, self._changes) | self._tied, self.section.route)
            finally:
                _fill(list(zip(buffers, now, strict=True)))
        if len(self._made) != len(self._looks):
            raise _other(f"saved {len(self._made)} tensors", f"{len(self._looks)}")
        for made, version in filter(None, self._made):
            refuse_written(version, version_of(made))

    def _keep(self, tensor: Tensor) -> None:
        number = len(self._made)
        look = self._looks[number] if number < len(self._looks) else ()
        if look not in (None, _look(tensor)):
            before = f"{look[1]}" if look else "nothing"
            raise _other(f"saved a tensor of shape {tuple(tensor.shape)}", before)
        self._made.append(None if look is None else (tensor.detach(), version_of(tensor)))

    def _give(self, number: int) -> Tensor:
        if not self._made:
            self.recompute()  # somebody asks ahead of the backward
        made = self._made[number]
        assert made is not None, "parameters stay"
        return made[0]


def _not_read(_: None) -> NoReturn:
    raise StageError(
        "a backward ran inside a forward that runs again; take recompute=false, or leave its module out"
    )


def _copies(items: Mapping[int, Any], changes: Iterable[int]) -> dict[int, Any]:
    """Values without their graph; those in ``changes``, and what shares their memory, over copies of it."""
    tensors = {n: item for n, item in items.items() if isinstance(item, Tensor)}
    storages = {memory_id(t): t.untyped_storage() for t in (tensors[n] for n in changes if n in tensors)}
    clones = {number: Bytes(storage.clone(), 0) for number, storage in storages.items()}
    found = dict(items)
    for number, item in tensors.items():
        clone = clones.get(memory_id(item)) if item.layout is torch.strided else None
        alone = item.detach() if clone is None else view_of(item).over(clone)
        found[number] = alone.requires_grad_(item.requires_grad)
    return found


def _look(tensor: Tensor) -> Look:
    return tensor.dtype, tensor.size(), tensor.stride() if tensor.layout is torch.strided else ()


def _fill(buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, content in buffers:
            buffer.copy_(content)


def _other(found: str, was: str) -> StageError:
    return StageError(
        f"a forward that runs again must do what it did, found that it {found}, and at first {was}; make its "
        "layers depend on their inputs alone, take recompute=false, or leave their module out"
    )
