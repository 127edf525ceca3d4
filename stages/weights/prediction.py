"""Forwards with the weights as they are expected to be at their backward: what an optimizer foretells.

A forward that is d updates older than its backward runs with w - d * (the step of the optimizer that its
state makes without a new gradient); decoupled weight decay is left out, as in the papers.
Source: SpecTrain (Chen et al., arXiv 1809.02839, section 3: momentum); PipeOptim (Guan et al.,
        arXiv 2312.00839: Adam, AdamW)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ...compression.errors import PlanError, StageError
from .idle import Version, copy_of
from .versions import Overwritten, Stashed

Settings = dict[str, Any]


def _sgd(weight: Tensor, state: Settings, group: Settings, times: int) -> None:
    weight.sub_(state["momentum_buffer"], alpha=times * _rate(group))


def _adam(weight: Tensor, state: Settings, group: Settings, times: int) -> None:
    count, (beta1, beta2) = float(state["step"]), map(float, group["betas"])
    mean = state["exp_avg"]
    square = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    if weight.is_complex():
        weight, mean, square = map(torch.view_as_real, (weight, mean, square))
    root = (square.sqrt() / (1 - beta2**count) ** 0.5).add_(group["eps"])
    weight.addcdiv_(mean, root, value=-(times * _rate(group) / (1 - beta1**count)))


def _rate(group: Settings) -> float:
    return float(group["lr"]) * (-1 if group["maximize"] else 1)


STEPS: dict[type[Optimizer], Callable[[Tensor, Settings, Settings, int], None]] = {
    SGD: _sgd,
    Adam: _adam,
    AdamW: _adam,
}


class Foretold:
    """The optimizer whose next steps its state foretells."""

    def __init__(self) -> None:
        """No optimizer is known yet."""
        self._optimizer: Optimizer | None = None

    def bind(self, optimizer: Optimizer) -> None:
        """Take ``optimizer``; raises PlanError if nobody has said how to predict it."""
        if type(optimizer) not in STEPS:
            raise PlanError(
                f"prediction knows {', '.join(kind.__name__ for kind in STEPS)}, found "
                f"{type(optimizer).__name__}; choose one of these, or prediction=false"
            )
        if any(not group.get("momentum", 1) for group in optimizer.param_groups):
            raise PlanError("prediction continues the momentum of SGD, found momentum=0; set one")
        self._optimizer = optimizer

    def moved(self, times: int) -> list[tuple[torch.nn.Parameter, Settings, Settings]]:
        """(parameter, its state, its group) for those that ``times`` more steps would move."""
        if not times:
            return []
        if self._optimizer is None:
            raise StageError("prediction reads an optimizer, found none; bind one before the first forward")
        groups, states = self._optimizer.param_groups, self._optimizer.state
        return [(p, states[p], group) for group in groups for p in group["params"] if _moves(states.get(p))]

    def step(self, weight: Tensor, state: Settings, group: Settings, times: int) -> None:
        """Move ``weight`` by ``times`` steps."""
        STEPS[type(self._optimizer)](weight, state, group, times)  # pyright: ignore[reportArgumentType]


def _moves(state: Settings | None) -> bool:
    return bool(state) and state.get("momentum_buffer", 0) is not None


class PredictedOverwritten(Overwritten):
    """One version; a forward sees it moved ahead, its backward as the optimizer really left it.

    It is moved in place and put back behind the forward, so that what autograd saved of it is the newest."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """As what it continues."""
        super().__init__(*args, **settings)
        self.foretold = Foretold()

    def bind(self, optimizer: Optimizer) -> None:
        """Predict the steps of ``optimizer``."""
        self.foretold.bind(optimizer)

    @contextlib.contextmanager
    def forward(self, micro_batch: int, batch: int) -> Iterator[None]:
        """The block in which the layers run, with the weights of the time of their backward."""
        moved = self.foretold.moved(min(micro_batch, self.lag) if self.parameters else 0)
        real = [copy_of(parameter.data) for parameter, _, _ in moved]
        try:
            for parameter, state, group in moved:
                self.foretold.step(parameter.data, state, group, min(micro_batch, self.lag))
            yield
        finally:
            for (parameter, _, _), values in zip(moved, real, strict=True):
                parameter.data.copy_(values)


class PredictedStashed(Stashed):
    """Forward and backward of a micro-batch run with the weights predicted at its forward."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """As what it continues."""
        super().__init__(*args, **settings)
        self.foretold = Foretold()

    def bind(self, optimizer: Optimizer) -> None:
        """Predict the steps of ``optimizer``."""
        self.foretold.bind(optimizer)

    def _asked(self, micro_batch: int, batch: int) -> Version:
        newest, times = super()._asked(micro_batch, batch), min(micro_batch, self.lag)
        moved = self.foretold.moved(times if self.parameters else 0)
        if not moved:
            return newest
        tensors = {id(p): copy_of(p.data) for p in self.parameters}
        for parameter, state, group in moved:
            self.foretold.step(tensors[id(parameter)], state, group, times)
        return self.version(newest.number, tensors.values())
