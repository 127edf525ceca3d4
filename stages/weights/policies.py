"""Which weights a micro-batch sees: the protocol, the policy that does nothing, and the table of all.

Layers run inside ``forward`` of their micro-batch, its backward inside ``backward``, an optimizer inside
``update``: what lies between two of them is the business of these policies. Buffers (the running statistics
of BatchNorm) have no versions: forwards write them, and every schedule runs those in ascending order.
Source: claims A4 and A5 of CN115016937A (a node keeps several versions of the weights)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Protocol

import torch
from torch.optim import Optimizer

from ...compression.errors import PlanError
from .double_buffered import DoubleBuffered
from .prediction import PredictedOverwritten, PredictedStashed
from .versions import Overwritten, Stashed, VerticalSync


class Weights(Protocol):
    """The versions of one stage's parameters; ``batch`` counts the batches fed since the last drain."""

    @property
    def num_live(self) -> int:
        """Distinct versions that are kept now, the newest among them."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of what is kept beside the parameters themselves, which are the newest version."""
        ...

    def bind(self, optimizer: Optimizer) -> None:
        """Tell of the optimizer of these parameters; PlanError if it should be predicted and cannot be."""
        ...

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
        """The block in which an optimizer writes the parameters: versions still needed are kept first.

        Behind it ``.grad`` holds what the next batch has gathered so far, None where that is nothing (the
        policy of synchronous schedules leaves it alone)."""
        ...

    def drained(self) -> None:
        """Nothing is in flight: count micro-batches, batches and updates from 0 again."""
        ...


class Latest:
    """One version, of which a synchronous schedule reads nothing while it is updated: nothing to do."""

    num_live, num_bytes = 1, 0

    def bind(self, optimizer: Optimizer) -> None:
        """Nothing is predicted."""

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


POLICIES = {
    "latest": Overwritten,
    "stashed": Stashed,
    "vertical_sync": VerticalSync,
    "double_buffered": DoubleBuffered,
}
PREDICTED = {"latest": PredictedOverwritten, "stashed": PredictedStashed}


def weights_named(
    name: str,
    *,
    parameters: Iterable[torch.nn.Parameter],
    stage: int,
    num_stages: int,
    asynchronous: bool,
    prediction: bool = False,
    tier: str = "device",
) -> Weights:
    """The policy ``name`` for the parameters that ``stage`` of ``num_stages`` owns.

    Args:    asynchronous: whether every micro-batch is an update of its own.
             prediction: forwards run with the weights as they are expected to be at the backward.
             tier: where a version waits that no instruction reads right now.
    Raises:  PlanError: there is no such policy, or not together with these."""
    known = PREDICTED if prediction else POLICIES
    if name not in known:
        which = "weights with prediction" if prediction else "weights"
        raise PlanError(f"{which} is one of {', '.join(known)}, found {name!r}; choose one of these")
    if name == "latest" and not (asynchronous or prediction):
        return Latest()
    if asynchronous == (name == "double_buffered"):
        updates = "whole batches" if name == "double_buffered" else "single micro-batches"
        raise PlanError(
            f"weights {name}{' with prediction' * prediction} is for updates by {updates}, the schedule "
            f"updates by {'single micro-batches' if asynchronous else 'whole batches'}; choose another one"
        )
    return known[name](parameters, stage=stage, num_stages=num_stages, tier=tier)
