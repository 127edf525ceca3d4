"""Several versions of a stage's parameters at once, each in memory of its own, put in place by a pointer.

``p.data = version`` exchanges the memory behind a parameter and copies nothing. What autograd saved of it
finds its version again: a view (``weight.t()``) holds its memory, a parameter itself is read when it is asked
for, so its version is in place during the backward. An optimizer writes in place, into a copy if something
still needs what it would overwrite, and its writes are not counted: autograd would take them for a mistake.
Source: PipeDream (Narayanan et al., SOSP 2019, section 3.3: weight stashing, vertical sync); PipeDream-2BW
        (Narayanan et al., ICML 2021, section 3: double-buffered updates)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..compression.errors import StageError


class Version:
    """The values of all parameters after ``number`` updates; ``tensors`` is empty while they are in place."""

    __slots__ = ("number", "tensors")

    def __init__(self, number: int, tensors: Iterable[Tensor] = ()) -> None:
        self.number, self.tensors = number, list(tensors)


class Stashed:
    """A micro-batch runs forward and backward with the weights that were the newest at its forward.

    Micro-batch m of stage s of S comes when max(0, m - (S - 1 - s)) others have updated the stage: that is
    the closed form of the asynchronous 1F1B, by which versions are asked for, and kept until nobody can."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], *, stage: int, num_stages: int) -> None:
        """Keep versions of those ``parameters`` that an optimizer may write."""
        self.parameters = [p for p in parameters if p.requires_grad]
        self.lag, self.delay = num_stages - 1 - stage, num_stages - 1
        self._start()

    def _start(self) -> None:
        self.newest = Version(0)
        self.kept: dict[int, Version] = {}
        self.running: dict[int, Version] = {}  # by micro-batch between its forward and done
        self.next = self.batch = 0

    @property
    def num_live(self) -> int:
        """Distinct versions that are kept now, the newest among them."""
        return 1 + len(self.kept)

    @property
    def num_bytes(self) -> int:
        """Bytes of the versions beside the newest, which is in place."""
        return sum(tensor.nbytes for version in self.kept.values() for tensor in version.tensors)

    def number(self, micro_batch: int, batch: int) -> int:
        """How many updates the weights of ``micro_batch`` have seen."""
        return max(0, micro_batch - self.lag)

    def ended(self, newest: int) -> bool:
        """Whether the last forward was: another would have come before there are ``newest`` updates."""
        return newest > max(0, self.next - self.lag)

    def bind(self, optimizer: Optimizer) -> None:
        """Nothing is predicted."""

    @contextlib.contextmanager
    def forward(self, micro_batch: int, batch: int) -> Iterator[None]:
        """The block in which the layers of ``micro_batch`` run, with its weights in place."""
        number = self.number(micro_batch, batch)
        version = self.newest if number == self.newest.number else self.kept.get(number)
        if version is None:
            raise StageError(
                f"micro-batch {micro_batch} runs with the weights after {number} updates, kept are "
                f"{sorted((*self.kept, self.newest.number))}; run forwards, backwards and updates in the "
                "order of the schedule"
            )
        self.running[micro_batch], self.next, self.batch = version, micro_batch + 1, batch
        self._forget()
        with self._placed(version):
            yield

    @contextlib.contextmanager
    def backward(self, micro_batch: int) -> Iterator[None]:
        """The block in which its backward runs, with the weights of its forward."""
        with self._placed(self.running[micro_batch]):
            yield

    def fetch(self, micro_batch: int) -> None:
        """They are on the device."""

    def done(self, micro_batch: int) -> None:
        """Forget the version of ``micro_batch`` if it was the last that needs it."""
        self.running.pop(micro_batch, None)
        self._forget()

    def due(self) -> None:
        """The gradients of the micro-batch before are in ``.grad``."""

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """The block in which an optimizer writes the parameters; each micro-batch starts from no gradient."""
        old = self.newest
        if self._needed(old, old.number + 1):
            old.tensors = [p.data for p in self.parameters]
            self.kept[old.number] = old
            for parameter in self.parameters:
                parameter.data = _copy(parameter.data)
        with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(self.parameters)):
            yield
        self.newest = Version(old.number + 1)
        self._forget()
        self._settle()

    def drained(self) -> None:
        """Nothing is in flight: keep the newest version only, and count from 0 again."""
        self._settle()
        self._start()

    def _settle(self) -> None:
        """An update has used up the gradients."""
        for parameter in self.parameters:
            parameter.grad = None

    def _needed(self, version: Version, newest: int) -> bool:
        """Whether ``version`` is read again when there are ``newest`` updates."""
        if any(version is other for other in self.running.values()):
            return True
        return not self.ended(newest) and version.number >= self.number(self.next, self.batch)

    def _forget(self) -> None:
        for version in list(self.kept.values()):
            if not self._needed(version, self.newest.number):
                del self.kept[version.number]

    @contextlib.contextmanager
    def _placed(self, version: Version) -> Iterator[None]:
        if version is self.newest:
            yield
            return
        newest = [p.data for p in self.parameters]
        _exchange(self.parameters, version.tensors)
        try:
            yield
        finally:
            _exchange(self.parameters, newest)


class VerticalSync(Stashed):
    """A micro-batch runs with the same version on all stages: the one of its forward on the first."""

    def number(self, micro_batch: int, batch: int) -> int:
        """How many updates the weights of ``micro_batch`` have seen."""
        return max(0, micro_batch - self.delay)


class DoubleBuffered(Stashed):
    """A batch of at least as many micro-batches as stages is one update; batch t runs with version t - 1.

    The first micro-batches of the next batch have run backward before all stages are through with this one:
    its gradients are set aside when the next begins."""

    def _start(self) -> None:
        super()._start()
        self.batches: dict[int, int] = {}  # by micro-batch between its forward and done
        self.gathering = 0
        self.whole: list[list[Tensor | None]] = []
        self.begun: list[Tensor | None] | None = None

    def number(self, micro_batch: int, batch: int) -> int:
        """How many updates the weights of ``batch`` have seen."""
        return max(0, batch - 1)

    def ended(self, newest: int) -> bool:
        """Whether the last batch was fed: the next begins before an update of this one."""
        return newest > self.batch

    @contextlib.contextmanager
    def forward(self, micro_batch: int, batch: int) -> Iterator[None]:
        """The block in which the layers of ``micro_batch`` run, with the weights of its batch in place."""
        self.batches[micro_batch] = batch
        with super().forward(micro_batch, batch):
            yield

    @contextlib.contextmanager
    def backward(self, micro_batch: int) -> Iterator[None]:
        """The block in which its backward runs; at the first of a batch, the gradients are set aside."""
        if self.batches[micro_batch] != self.gathering:
            self.gathering = self.batches[micro_batch]
            self.whole.append([p.grad for p in self.parameters])
            self._gather([None] * len(self.parameters))
        with super().backward(micro_batch):
            yield

    def done(self, micro_batch: int) -> None:
        """Forget the version of ``micro_batch`` if it was the last that needs it."""
        self.batches.pop(micro_batch, None)
        super().done(micro_batch)

    def due(self) -> None:
        """Put the gradients of the oldest whole batch into ``.grad``, set aside what the next has begun."""
        if self.whole:
            self.begun = [p.grad for p in self.parameters]
            self._gather(self.whole.pop(0))

    def _settle(self) -> None:
        """What the next batch has begun goes on; None at its start, sums that start from zeros lose -0.0."""
        if self.begun is None:
            self.gathering += 1
        self._gather(self.begun or [None] * len(self.parameters))
        self.begun = None

    def _gather(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient


def _exchange(parameters: list[torch.nn.Parameter], tensors: list[Tensor]) -> None:
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.data = tensor


def _copy(tensor: Tensor) -> Tensor:
    """The same values at the same strides in fresh memory."""
    new = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return new.copy_(tensor)
