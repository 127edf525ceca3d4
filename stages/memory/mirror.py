"""The mirror of a stage's parameters: a store has their master copy, and few of them are near at a time.

    forward    a layer's parameters come before it and leave after it
    backward   they come when the first of its nodes reads them, or when their gradient has been computed;
               a gradient leaves as soon as it was added, and its parameter with it
    update     layer by layer: parameters, gradients and what the optimizer keeps of them come, and leave

What autograd saved of a parameter is a note of where it lies in it: who reads the note has it brought.
Source: steps S2, S4, S5 and S7 of the resource management of distributed deep learning (parameters, gradients
        and historical gradients have their place in host memory, where the update finds them).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ...compression.errors import StageError
from ..tracing.layers import Layer
from .saved_storage import refuse_written
from .store import Store
from .tensor_memory import Frames, TensorMemory, hollow, may_leave
from .tensor_view import TensorView, bytes_around, view_of

Turn = Sequence[Parameter]
NEAR = 2  # layers whose parameters stay near in a backward, where branches of a network take turns


class _Mirrored:
    """One parameter: where its bytes are, those of its gradient, and of what the optimizer keeps of it."""

    __slots__ = ("cdata", "gradient", "hooked", "memory", "near", "parameter", "state", "turn", "version")

    def __init__(self, frames: Frames, parameter: Parameter, turn: int) -> None:
        self.parameter, self.turn = parameter, turn
        self.memory = TensorMemory(frames, parameter)
        self.gradient: TensorMemory | None = None
        self.state: dict[Any, TensorMemory] = {}
        self.near, self.hooked, self.version = True, False, parameter._version
        self.cdata = parameter.untyped_storage()._cdata


class Mirror:
    """The parameters of one stage that may leave, by the layers that read them.

    Attributes: turns: those parameters in parts, layer by layer: an update takes one part after the other.
                near_bytes, peak_bytes: of them, their gradients and the optimizer's state, near now and at
                most; bytes_in, bytes_out: that came and left."""

    def __init__(
        self, store: Store, *, readers: Mapping[str, Sequence[Parameter]], packs: bool, min_bytes: int
    ) -> None:
        """Begin with all of them near.

        Args:    readers: by name of a layer, in running order, the parameters that it reads.
                 packs: they are packed where that pays.
                 min_bytes: smaller ones stay near, as smaller tensors of an optimizer do."""
        self._frames, self._min_bytes = Frames(store, packs=packs), min_bytes
        self._all: dict[int, _Mirrored] = {}
        self._by_layer: dict[str, list[_Mirrored]] = {}
        self.turns: list[list[Parameter]] = []
        for name, read in readers.items():
            able = [p for p in read if id(p) in self._all or may_leave(p.data, min_bytes=min_bytes)]
            if first := [p for p in able if id(p) not in self._all]:
                self._all |= {id(p): _Mirrored(self._frames, p, len(self.turns)) for p in first}
                self.turns.append(first)
            self._by_layer[name] = [self._all[id(p)] for p in able]
        self._near = dict.fromkeys(self._all.values())
        self._storages = {one.cdata: one for one in self._near}
        self._recent: list[int] = []  # turns, in a backward
        self._walks = False  # a forward runs
        self._optimizer: Optimizer | None = None
        self._hooks: list[Any] = []
        self.near_bytes = self.peak_bytes = sum(one.memory.num_bytes for one in self._near)

    @property
    def bytes_in(self) -> int:
        """Bytes that came, unpacked."""
        return self._frames.bytes_in

    @property
    def bytes_out(self) -> int:
        """Bytes that left, unpacked."""
        return self._frames.bytes_out

    def bind(self, optimizer: Optimizer) -> None:
        """Tell of the optimizer of these parameters, whose state of them leaves with them."""
        self._optimizer = optimizer

    def begin(self) -> None:
        """A step begins: no gradient is left of the one before, and gradients leave when they are final."""
        for one in self._all.values():
            self._forget_gradient(one)
            if one.parameter.requires_grad and not one.hooked:
                one.hooked = True
                added = functools.partial(self._added, one)
                self._hooks.append(one.parameter.register_hook(functools.partial(self._arrives, one)))
                self._hooks.append(one.parameter.register_post_accumulate_grad_hook(added))

    # -- forward ----------------------------------------------------------------------------------------

    def layer_done(self, done: Layer | None, following: Layer | None) -> None:
        """Between two layers of a forward: what ``done`` read leaves, what ``following`` reads comes."""
        wanted = self._by_layer.get(following.name, []) if following is not None else []
        if done is None:
            self.settle()
        else:
            for one in self._by_layer.get(done.name, ()):
                if one not in wanted:
                    self._leave(one)
        self._walks = following is not None
        for one in wanted:
            self._come(one)
        if wanted:
            self.prefetch(max(one.turn for one in wanted) + 1)

    def prefetch(self, turn: int) -> None:
        """Begin to bring the parameters of a turn that is wanted soon, and in a backward their gradients."""
        for parameter in self.turns[turn] if 0 <= turn < len(self.turns) else ():
            one = self._all[id(parameter)]
            if not one.near:
                one.memory.fetch()
            if not self._walks and one.gradient is not None:
                one.gradient.fetch()

    def settle(self) -> None:
        """All of them leave: between two walks, and where one failed."""
        for one in list(self._near):
            self._leave(one)
        self._recent.clear()
        self._walks = False

    # -- backward ---------------------------------------------------------------------------------------

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is one of the parameters that are near, or a part of one."""
        return tensor.untyped_storage()._cdata in self._storages

    def saved(self, tensor: Tensor) -> Callable[[], Tensor]:
        """What autograd keeps in the place of ``tensor``, which ``holds``: the call that gives it back."""
        one = self._storages[tensor.untyped_storage()._cdata]
        begins = tensor.data_ptr() - one.parameter.data_ptr()
        view = None if tensor is one.parameter else view_of(tensor)._replace(start=begins)
        return functools.partial(self._read, one, view, tensor._version)

    def _read(self, one: _Mirrored, view: TensorView | None, version: int) -> Tensor:
        refuse_written(version, one.parameter._version)
        self._wanted(one)
        return one.parameter.detach() if view is None else view.over(bytes_around(0, one.parameter.data))

    def _wanted(self, one: _Mirrored) -> None:
        """A backward reads it: it comes, and what was near longest leaves."""
        if one.near:
            return
        self._come(one)
        if not self._walks and one.turn not in self._recent:
            self.prefetch(one.turn - 1)
            self._recent.append(one.turn)
            if len(self._recent) > NEAR:
                last = self._recent.pop(0)
                for other in [other for other in self._near if other.turn == last]:
                    self._leave(other)

    def _arrives(self, one: _Mirrored, gradient: Tensor) -> None:
        """Ahead of adding ``gradient``: what there is of it comes."""
        self._wanted(one)
        if one.gradient is not None:
            one.parameter.grad = self._counted(one.gradient.take())
            one.gradient = None
        elif one.parameter.grad is None and gradient.layout is torch.strided:
            self._count(gradient.nbytes)

    def _added(self, one: _Mirrored, _: Tensor) -> None:
        self.push_gradient(one.parameter)
        if not self._walks:
            self._leave(one)

    def push_gradient(self, parameter: Parameter) -> None:
        """The gradient of ``parameter`` leaves; one that is not dense stays."""
        one, gradient = self._all[id(parameter)], parameter.grad
        if gradient is not None and may_leave(gradient, min_bytes=1):
            memory = TensorMemory(self._frames, gradient)
            if memory.put(gradient):
                one.gradient, parameter.grad = memory, None
                self._count(-gradient.nbytes)

    # -- update -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def gradients(self, turn: Turn, *, written: bool) -> Iterator[dict[int, Tensor]]:
        """The block in which the gradients of ``turn`` are near, by the identity of their parameters.

        Args:    written: what is done to them there stays."""
        known = [(one, one.gradient) for p in turn if (one := self._all[id(p)])]
        found = {id(one.parameter): self._counted(memory.get()) for one, memory in known if memory}
        stay = {id(p): p.grad for p in turn if p.grad is not None}
        yield found | stay
        for one, memory in known:
            if memory is not None:
                gradient = found.pop(id(one.parameter))
                self._count(-gradient.nbytes)
                if not memory.put(gradient, written=written):
                    raise self._no_room()

    @contextlib.contextmanager
    def whole(self, turn: Turn) -> Iterator[None]:
        """The block in which ``turn`` is near as it would be without a mirror, to be written."""
        self._pull(turn)
        yield
        self._push(turn)

    def pull_all(self) -> None:
        """All parameters come, with their gradients and the state of the optimizer."""
        for turn in self.turns:
            self._pull(turn)

    def push_all(self) -> None:
        """All of them leave as they are now."""
        for turn in self.turns:
            self._push(turn)

    def close(self) -> None:
        """The model has all its parameters again, and keeps them."""
        self.pull_all()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _pull(self, turn: Turn) -> None:
        for one in (self._all[id(p)] for p in turn):
            self._come(one)
            if one.gradient is not None:
                one.parameter.grad = self._counted(one.gradient.take())
                one.gradient = None
            kept = self._state(one.parameter)
            for key, memory in one.state.items():
                if memory.stored and key in kept:
                    kept[key].data = self._counted(memory.take())
            one.memory.drop()

    def _push(self, turn: Turn) -> None:
        for one in (self._all[id(p)] for p in turn):
            self.push_gradient(one.parameter)
            for key, item in self._state(one.parameter).items():
                if isinstance(item, Tensor) and may_leave(item, min_bytes=self._min_bytes):
                    memory = one.state[key] = TensorMemory(self._frames, item)
                    if memory.put(item):
                        self._count(-item.nbytes)
                        hollow(item)
            self._leave(one)

    # -- one of them ------------------------------------------------------------------------------------

    def _come(self, one: _Mirrored) -> None:
        parameter = one.parameter
        if one.near:
            return
        if parameter._version != one.version:
            raise StageError(
                "a parameter of a mirror is written to by its optimizer, or while it is near, found one of "
                f"{parameter.dtype} that was written to while it was away; do so inside of Pipeline.near()"
            )
        parameter.data = self._counted(one.memory.get())
        one.near, one.cdata = True, parameter.untyped_storage()._cdata
        self._near[one], self._storages[one.cdata] = None, one

    def _leave(self, one: _Mirrored) -> None:
        parameter = one.parameter
        if not one.near or not one.memory.put(parameter.data, written=parameter._version != one.version):
            return
        self._count(-one.memory.num_bytes)
        hollow(parameter)
        one.near, one.version = False, parameter._version
        del self._near[one], self._storages[one.cdata]

    def _state(self, parameter: Parameter) -> dict[Any, Any]:
        found = {} if self._optimizer is None else self._optimizer.state
        return found[parameter] if parameter in found else {}

    def _forget_gradient(self, one: _Mirrored) -> None:
        if one.gradient is not None:
            one.gradient.drop()
            one.gradient = None

    def _counted(self, tensor: Tensor) -> Tensor:
        self._count(tensor.nbytes)
        return tensor

    def _count(self, num_bytes: int) -> None:
        self.near_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.near_bytes)

    def _no_room(self) -> StageError:
        return StageError("the store of a mirror has no room for a gradient; raise its budget")
