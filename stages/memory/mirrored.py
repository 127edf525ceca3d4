"""A stage whose parameters come and go: what its walks tell a mirror, beside what keeps its saved tensors."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..tracing.layers import Layer
from .hooks import ParameterFilter
from .mirror import Mirror
from .saved import Came, Entered, NoOffload, SavedActivations, Went


class MirroredFilter(ParameterFilter):
    """Tells parameters too; of those of a mirror that are near, autograd keeps a note."""

    def __init__(self, keep: Iterable[Tensor], mirror: Mirror) -> None:
        """``keep``: all parameters and buffers of the stage."""
        super().__init__(keep)
        self._mirror = mirror

    def also(self, keep: Iterable[Tensor]) -> ParameterFilter:
        """Return the filter that lets those through too."""
        return self._with(MirroredFilter(keep, self._mirror))

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is one of them."""
        return self._mirror.holds(tensor) or super().holds(tensor)

    def untouched(self, tensor: Tensor) -> Callable[[], Tensor]:
        """What autograd keeps in the place of what ``holds``."""
        if self._mirror.holds(tensor) and not (tensor.is_conj() or tensor.is_neg()):
            return self._mirror.saved(tensor)
        return super().untouched(tensor)


class MirrorWalk(NoOffload):
    """What a walk tells that keeps nothing for a backward: the second one of a forward, and evaluation."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror

    def layer_done(self, done: Layer | None, following: Layer | None) -> None:
        """Parameters of ``done`` leave, those of ``following`` come."""
        self._mirror.layer_done(done, following)


class Mirrored(NoOffload):
    """``saved`` of a stage with a mirror, told the same things.

    Args:    parameters: what its hooks let through; they are its own only where ``saved`` has none."""

    def __init__(
        self, saved: SavedActivations | NoOffload, mirror: Mirror, parameters: MirroredFilter
    ) -> None:
        self.saved, self.mirror, self._parameters = saved, mirror, parameters
        self._counts = saved
        self._hooks = type(saved) is NoOffload

    @property
    def exposed_seconds(self) -> float:
        """Seconds for which walks waited for what was not back yet, parameters too."""
        return self.saved.exposed_seconds + self.mirror.frames.exposed_seconds

    @contextlib.contextmanager
    def forward(self, micro_batch: int, entered: Entered, keep: Iterable[Tensor] = ()) -> Iterator[None]:
        """The block in which the layers of ``micro_batch`` run."""
        hooks = contextlib.nullcontext()
        if self._hooks:
            parameters = self._parameters
            hooks = torch.autograd.graph.saved_tensors_hooks(parameters.untouched, operator.call)
        with self.saved.forward(micro_batch, entered, keep), hooks:
            yield

    def repeats(self, micro_batch: int, again: Any) -> None:
        """How the layers run again, where they do."""
        self.saved.repeats(micro_batch, again)

    def layer_done(self, done: Layer | None, following: Layer | None) -> None:
        """Parameters of ``done`` leave, those of ``following`` come."""
        self.saved.layer_done(done, following)
        self.mirror.layer_done(done, following)

    def offload(self, micro_batch: int, came: Came, went: Went) -> None:
        """Begin to move what a forward saved."""
        self.saved.offload(micro_batch, came, went)

    def fetch(self, micro_batch: int) -> None:
        """Begin to bring back what a forward saved."""
        self.saved.fetch(micro_batch)

    def ahead(self, micro_batch: int) -> None:
        """Begin to bring the parameters that the backward of ``micro_batch`` reads first."""
        self.mirror.prefetch(len(self.mirror.turns) - 1)

    def ready(self, micro_batch: int) -> None:
        """Wait for what a forward saved."""
        self.saved.ready(micro_batch)

    def drop(self, micro_batch: int) -> None:
        """Forget what a forward saved; parameters that its backward left near leave."""
        self.saved.drop(micro_batch)
        self.mirror.settle()

    def wait(self) -> None:
        """Wait until everything that was to leave has left."""
        self.saved.wait()

    def close(self) -> None:
        """End the threads; the model has all its parameters again."""
        self.saved.close()
        self.mirror.close()
