"""Several versions of a stage's parameters at once, each in memory of its own, put in place by a pointer.

``p.data = version`` exchanges the memory behind a parameter and copies nothing. What autograd saved of it
finds its version again: a view (``weight.t()``) holds its memory, a parameter itself is read when it is asked
for, so its version is in place during the backward. An optimizer writes in place, into a copy if something
still needs what it would overwrite, and its writes are not counted: autograd would take them for a mistake.
Source: PipeDream (Narayanan et al., SOSP 2019, section 3.3: weight stashing, vertical sync); PipeDream-2BW
        (Narayanan et al., ICML 2021, section 3: double-buffered updates)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from ...compression.errors import PlanError, StageError
from ..memory.stores import STORES
from .idle import Idle, Version, copy_of


class Overwritten:
    """One version, written in place: a backward sees newer weights than its forward did.

    What autograd saved of a parameter shows what stands there now; what was computed from one (a cast under
    autocast) is as old as its forward. Every micro-batch is an update of its own."""

    num_live, num_bytes = 1, 0

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], *, stage: int, num_stages: int, tier: str
    ) -> None:
        """Those ``parameters`` that an optimizer may write; ``tier`` is where nothing waits."""
        self.parameters = [p for p in parameters if p.requires_grad]
        self.lag, self.delay = num_stages - 1 - stage, num_stages - 1
        places = [p.data_ptr() for p in self.parameters if p.numel()]
        if len(set(places)) < len(places):
            raise PlanError(
                f"versions of the weights need parameters in memory of their own, found {len(places)} in "
                f"{len(set(places))} places; make shared ones one parameter"
            )

    def bind(self, optimizer: Optimizer) -> None:
        """Nothing is predicted."""

    @contextlib.contextmanager
    def forward(self, micro_batch: int, batch: int) -> Iterator[None]:
        """The weights as they are."""
        yield

    @contextlib.contextmanager
    def backward(self, micro_batch: int) -> Iterator[None]:
        """The weights as they are."""
        yield

    def fetch(self, micro_batch: int) -> None:
        """They are here."""

    def done(self, micro_batch: int) -> None:
        """They stay."""

    def due(self) -> None:
        """The gradients of the micro-batch before are in ``.grad``."""

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """The block in which an optimizer writes the parameters; the next micro-batch has no gradient yet."""
        with _unsafe_preserve_version_counter(tuple(self.parameters)):
            yield
        self._settle()

    def drained(self) -> None:
        """Nothing is in flight, and no gradient is left."""
        self._settle()

    def _settle(self) -> None:
        self._gather([None] * len(self.parameters))

    def _gather(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient


class Stashed(Overwritten):
    """A micro-batch runs forward and backward with the weights that were the newest at its forward.

    Micro-batch m of stage s of S comes when max(0, m - (S - 1 - s)) others have updated the stage: that is
    the closed form of the asynchronous 1F1B, by which versions are asked for, and kept until nobody can."""

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], *, stage: int, num_stages: int, tier: str
    ) -> None:
        """Keep versions in ``tier`` while no instruction reads them."""
        super().__init__(parameters, stage=stage, num_stages=num_stages, tier=tier)
        self.version: Callable[..., Version] = Version
        if tier in STORES:
            self.version = functools.partial(Idle, store=STORES[tier]())
        self._start()

    def _start(self) -> None:
        self.newest = self.version(0, ours=False)  # by now a person may look into the parameters' memory
        self.kept: dict[int, Version] = {}
        self.running: dict[int, Version] = {}  # by micro-batch between its forward and done
        self.next = self.batch = 0
        self.spare: list[Tensor] = []  # the memory of the last version dropped: fresh pages cost a copy more

    @property
    def num_live(self) -> int:
        """Distinct versions that are kept now, the newest among them."""
        return 1 + len(self.older)

    @property
    def num_bytes(self) -> int:
        """Bytes of the versions beside the newest, which is in place."""
        return sum(version.num_bytes for version in self.older)

    @property
    def older(self) -> list[Version]:
        """All versions but the newest: those that the schedule will ask for, and those in flight."""
        found = {id(version): version for version in (*self.kept.values(), *self.running.values())}
        found.pop(id(self.newest), None)
        return list(found.values())

    def number(self, micro_batch: int, batch: int) -> int:
        """How many updates the weights of ``micro_batch`` have seen."""
        return max(0, micro_batch - self.lag)

    def ended(self, newest: int) -> bool:
        """Whether the last forward was: another would have come before there are ``newest`` updates."""
        return newest > max(0, self.next - self.lag)

    @contextlib.contextmanager
    def forward(self, micro_batch: int, batch: int) -> Iterator[None]:
        """The block in which the layers of ``micro_batch`` run, with its weights in place."""
        version = self._asked(micro_batch, batch)
        self.running[micro_batch], self.next, self.batch = version, micro_batch + 1, batch
        self._forget()
        with self._placed(version):
            yield

    @contextlib.contextmanager
    def backward(self, micro_batch: int) -> Iterator[None]:
        """The block in which its backward runs, with the weights of its forward."""
        with self._placed(self._of(micro_batch)):
            yield

    def fetch(self, micro_batch: int) -> None:
        """Begin to bring back the version of ``micro_batch``."""
        self._of(micro_batch).fetch()

    def done(self, micro_batch: int) -> None:
        """Forget the version of ``micro_batch`` if it was the last that needs it."""
        version = self.running.pop(micro_batch, None)
        self._forget()
        if version is not None and all(version is not other for other in (*self.older, self.newest)):
            self.spare = version.drop() or self.spare

    @contextlib.contextmanager
    def update(self) -> Iterator[None]:
        """The block in which an optimizer writes the parameters, in a copy if their version is read again."""
        old = self.newest
        if self._needed(old, old.number + 1):
            old.tensors = [p.data for p in self.parameters]
            self.kept[old.number] = old
            _exchange(self.parameters, self._copies(old.tensors))
            old.leave()
        with super().update():
            yield
        self.newest = self.version(old.number + 1, ours=old.ours or old.number in self.kept)
        self._forget()

    def drained(self) -> None:
        """Nothing is in flight: keep the newest version only, and count from 0 again."""
        super().drained()
        for version in self.older:
            version.drop()
        self._start()

    def _of(self, micro_batch: int) -> Version:
        if micro_batch not in self.running:
            raise StageError(
                f"the weights of micro-batch {micro_batch} are kept from its forward to its last backward, "
                f"found those of {sorted(self.running)}; run its forward first, and nothing after done"
            )
        return self.running[micro_batch]

    def _asked(self, micro_batch: int, batch: int) -> Version:
        number = self.number(micro_batch, batch)
        version = self.newest if number == self.newest.number else self.kept.get(number)
        if version is None:
            raise StageError(
                f"micro-batch {micro_batch} runs with the weights after {number} updates, kept are "
                f"{sorted((*self.kept, self.newest.number))}; run forwards, backwards and updates in the "
                "order of the schedule"
            )
        return version

    def _needed(self, version: Version, newest: int) -> bool:
        """Whether ``version`` is read again when there are ``newest`` updates."""
        if any(version is other for other in self.running.values()):
            return True
        return not self.ended(newest) and version.number >= self.number(self.next, self.batch)

    def _forget(self) -> None:
        for version in list(self.kept.values()):
            if not self._needed(version, self.newest.number):
                self.spare = self.kept.pop(version.number).drop() or self.spare

    def _copies(self, tensors: list[Tensor]) -> list[Tensor]:
        spare, self.spare = self.spare, []
        if not spare:
            return [copy_of(tensor) for tensor in tensors]
        for new, old in zip(spare, tensors, strict=True):
            new.copy_(old)
        return spare

    @contextlib.contextmanager
    def _placed(self, version: Version) -> Iterator[None]:
        if version is self.newest:
            yield
            return
        newest = [p.data for p in self.parameters]
        version.bring()
        _exchange(self.parameters, version.tensors)
        try:
            yield
        finally:
            _exchange(self.parameters, newest)
            version.leave()


class VerticalSync(Stashed):
    """A micro-batch runs with the same version on all stages: the one of its forward on the first."""

    def number(self, micro_batch: int, batch: int) -> int:
        """How many updates the weights of ``micro_batch`` have seen."""
        return max(0, micro_batch - self.delay)


def _exchange(parameters: list[torch.nn.Parameter], tensors: Iterable[Tensor]) -> None:
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.data = tensor
