"""One parameter of a mirror: where its bytes are, those of its gradient, and what an optimizer keeps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from ...compression.errors import StageError
from .tensor_memory import Frames, TensorMemory, hollow, may_leave

Kept = Mapping[Any, Any]  # what an optimizer keeps of a parameter


class ParameterMemory:
    """Begins near, as it is.

    Attributes: turn: the part of the mirror that it belongs to; storage: the identity of its memory while it
                is near, by which parts of it are known."""

    __slots__ = ("_ahead", "_frames", "_gradient", "_hooks", "_lock", "_memory", "_soon", "_state",
                 "_version", "near", "parameter", "storage", "turn")  # fmt: skip

    def __init__(self, frames: Frames, parameter: Parameter, turn: int) -> None:
        self._frames, self.parameter, self.turn = frames, parameter, turn
        self._memory = TensorMemory(frames, parameter.data)
        self._gradient: TensorMemory | None = None
        self._ahead, self._lock = cast(Tensor | None, None), threading.Lock()  # values brought ahead
        self._soon = False
        self._state: dict[Any, TensorMemory] = {}
        self._version, self.near = parameter._version, True
        self._hooks: tuple[Any, ...] = ()  # the first and the last on its gradient
        self.storage = parameter.untyped_storage()._cdata

    @property
    def num_bytes(self) -> int:
        """Bytes of it, of its gradient, and of what is kept of it and moves, near or not."""
        state = sum(memory.num_bytes for memory in self._state.values())
        return (1 + self.parameter.requires_grad) * self._memory.num_bytes + state

    def near_bytes(self, kept: Kept) -> int:
        """Bytes of all that which are near."""
        items = self.parameter, self.parameter.grad, *kept.values()
        dense = (t for t in items if isinstance(t, Tensor) and t.layout is torch.strided)
        return sum(tensor.nbytes for tensor in dense)

    @property
    def ahead_bytes(self) -> int:
        """Bytes of its values that were brought ahead."""
        return 0 if (found := self._ahead) is None else found.nbytes

    # -- its values, which are there to be read -----------------------------------------------------------

    def come(self) -> None:
        """Its values come.

        Raises: StageError: it was written to while it was away."""
        self._refuse_written()
        self._frames.ahead.check()
        with self._frames.exposed(), self._lock:
            found, self._ahead = self._ahead, None
            self.parameter.data = self._memory.get() if found is None else found
            self.near, self._soon = True, False
        self.storage = self.parameter.untyped_storage()._cdata

    def _refuse_written(self) -> None:
        if self.parameter._version != self._version:
            raise StageError(
                "a parameter of a mirror is written to where it is near, found one of shape "
                f"{tuple(self._memory.like.shape)} and {self.parameter.dtype} that was written to while it "
                "was away; write to it inside of Pipeline.near()"
            )

    def away(self, kept: Kept) -> Iterator[tuple[Tensor, TensorMemory]]:
        """Of its values and what is kept of it what is not near: the tensor, and where its bytes are.

        Raises: StageError: it was written to while it was away."""
        if not self.near:
            self._refuse_written()
            yield self.parameter, self._memory
        for key, memory in self._state.items():
            if memory.stored and key in kept:
                yield kept[key], memory

    def leave(self) -> bool:
        """They leave; False: the store has no room for them."""
        version = self.parameter._version
        if not self._memory.put(self.parameter.data, written=version != self._version):
            return False
        hollow(self.parameter)
        self.near, self._version = False, version
        return True

    def fetch(self, *, gradient: bool) -> None:
        """They are wanted soon, and the ``gradient``."""
        if not self.near:
            self._memory.fetch()
            if not self._soon and self._memory.takes_time:
                self._soon = True
                self._frames.ahead.try_submit(self._bring)
        if gradient and self._gradient is not None:
            self._gradient.fetch()

    def _bring(self) -> None:
        """In the thread of ``Frames``: have its values at hand; nobody writes to them until they come."""
        with self._lock:
            if self._soon and not self.near:
                self._ahead = self._memory.get()

    def forget_ahead(self) -> None:
        """They are not wanted soon."""
        with self._lock:
            self._ahead, self._soon = None, False

    # -- its gradient -------------------------------------------------------------------------------------

    def hook(self, *, first: Callable[[Tensor], None], last: Callable[[Tensor], None]) -> None:
        """Call ``first`` with a gradient ahead of all other hooks, ``last`` behind them: those of people, who
        may have added some since, read the parameter in between."""
        if not self._hooks:
            ahead = self.parameter.register_hook(first)
            self._hooks = ahead, self.parameter.register_post_accumulate_grad_hook(last)
        ahead, behind = self._hooks
        parameter: Any = self.parameter
        _reorder(parameter._backward_hooks, lambda key: key != ahead.id)
        _reorder(parameter._post_accumulate_grad_hooks, lambda key: key == behind.id)

    def unhook(self) -> None:
        """Call nobody any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()

    def bring_gradient(self) -> None:
        """What there is of its gradient comes, to be written; its values are near."""
        if self._gradient is not None:
            self.parameter.grad = self._gradient.take()
            self._gradient = None

    def push_gradient(self) -> None:
        """Its gradient leaves; one that is not dense stays, and what finds no room."""
        gradient = self.parameter.grad
        if gradient is not None and may_leave(gradient, min_bytes=1):
            memory = TensorMemory(self._frames, gradient)
            if memory.put(gradient):
                self._gradient, self.parameter.grad = memory, None

    def look_at_gradient(self) -> Tensor | None:
        """Return its gradient, if there is one, while its values may be away."""
        return self.parameter.grad if self._gradient is None else self._gradient.get()

    def looked_at(self, gradient: Tensor | None, *, written: bool) -> None:
        """The gradient that was looked at leaves again."""
        if gradient is not None and self._gradient is not None:
            if not self._gradient.put(gradient, written=written):
                raise StageError("the store of a mirror has no room for a gradient; raise its budget")

    def forget_gradient(self) -> None:
        """It has no gradient any more."""
        if self._gradient is not None:
            self._gradient.drop()
            self._gradient = None

    # -- all of it, to be written -------------------------------------------------------------------------

    def pull(self, kept: Kept) -> None:
        """Gradient and what is kept come beside its values, which are near; all of it may be written."""
        self.bring_gradient()
        for key, memory in self._state.items():
            if memory.stored and key in kept:
                kept[key].data = memory.take()
        self._memory.drop()

    def push(self, kept: Kept, *, min_bytes: int) -> None:
        """Gradient and what is kept of ``min_bytes`` or more leave, as they are now."""
        self.push_gradient()
        for key, item in kept.items():
            if isinstance(item, Tensor) and may_leave(item, min_bytes=min_bytes):
                memory = self._state[key] = TensorMemory(self._frames, item)
                if memory.put(item):
                    hollow(item)


def _reorder(hooks: dict[int, Any], place: Callable[[int], bool]) -> None:
    """Have the ``hooks`` of a tensor in the order of ``place``, in which torch then calls them."""
    order = sorted(hooks, key=place)
    if order != list(hooks):
        found = {key: hooks[key] for key in order}
        hooks.clear()
        hooks.update(found)
