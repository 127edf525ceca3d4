"""Which weights a micro-batch sees: the policies of asynchronous training, and the one that does nothing.

Layers run inside ``forward`` of their micro-batch, its backward inside ``backward``, an optimizer inside
``update``: what lies between two of them is this file's business.
Source: claims A4 and A5 of CN115016937A (a node keeps several versions of the weights)."""

from __future__ import annotations

import contextlib
from typing import Protocol


class Weights(Protocol):
    """The versions of one stage's parameters; ``batch`` counts the batches fed since the last drain.

    ``num_live``: distinct versions that are kept now, the newest among them; ``num_bytes``: their bytes."""

    num_live: int
    num_bytes: int

    def forward(self, micro_batch: int, batch: int) -> contextlib.AbstractContextManager[None]:
        """The block in which the layers of ``micro_batch`` run, with its weights in place."""
        ...

    def backward(self, micro_batch: int) -> contextlib.AbstractContextManager[None]:
        """The block in which its B, or its I or W, runs; the gradients of its batch gather in ``.grad``."""
        ...

    def fetch(self, micro_batch: int) -> None:
        """Ahead of ``backward``: begin to bring back the version it needs."""
        ...

    def done(self, micro_batch: int) -> None:
        """Nothing needs the weights of ``micro_batch`` any more: after its B or W."""
        ...

    def due(self) -> None:
        """Ahead of ``update``, on all stages: put the gradients of the oldest whole batch into ``.grad``."""
        ...

    def update(self) -> contextlib.AbstractContextManager[None]:
        """The block in which an optimizer writes the parameters: versions still needed are kept first."""
        ...

    def drained(self) -> None:
        """Nothing is in flight: count micro-batches, batches and updates from 0 again."""
        ...


class Latest:
    """One version, of which a synchronous schedule reads nothing while it is updated: nothing to do."""

    num_live, num_bytes = 1, 0

    def forward(self, micro_batch: int, batch: int) -> contextlib.AbstractContextManager[None]:
        """The weights as they are."""
        return contextlib.nullcontext()

    def backward(self, micro_batch: int) -> contextlib.AbstractContextManager[None]:
        """The weights as they are."""
        return contextlib.nullcontext()

    def fetch(self, micro_batch: int) -> None:
        """They are here."""

    def done(self, micro_batch: int) -> None:
        """They stay."""

    def due(self) -> None:
        """All gradients are those of the step."""

    def update(self) -> contextlib.AbstractContextManager[None]:
        """In place."""
        return contextlib.nullcontext()

    def drained(self) -> None:
        """Nothing is counted."""
