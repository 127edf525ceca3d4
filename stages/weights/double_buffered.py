"""The weights of PipeDream-2BW: a batch is one update, and runs with the version before the newest.

Between the first update that a batch could use and the one that it does lies a whole batch: time for all
stages to finish theirs, so that no stage waits for another and at most two versions live.
Source: PipeDream-2BW (Narayanan et al., ICML 2021, section 3.1)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import Tensor

from .idle import Version
from .versions import Stashed


class DoubleBuffered(Stashed):
    """A batch of at least as many micro-batches as stages is one update; batch t runs with version t - 1.

    The first micro-batches of the next batch have run backward before all stages are through with this one:
    its gradients are set aside when the next begins."""

    def _start(self) -> None:
        super()._start()
        self.batches: dict[int, int] = {}  # by micro-batch between its forward and done
        self.gathering = 0  # the batch whose gradients are in .grad
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
        if self.batches.get(micro_batch, self.gathering) != self.gathering:
            self.gathering = self.batches[micro_batch]
            self.whole.append([p.grad for p in self.parameters])
            self._gather([None] * len(self.parameters))
        with super().backward(micro_batch):
            yield

    def _needed(self, version: Version, newest: int) -> bool:
        """Whether ``version`` is read again; a stage alone updates before the next batch, which reads it."""
        if self.delay == 0 and newest > self.batch:
            return version.number >= self.number(self.next, self.batch + 1)
        return super()._needed(version, newest)

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
