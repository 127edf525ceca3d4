"""Weight prediction: the optimizer's next steps, made ahead from its state, without a new gradient.

A forward that is d updates older than its backward runs with w - d * (that step), so that both see nearly the
same weights; decoupled weight decay is left out, as in the papers.
Source: SpecTrain (Chen et al., arXiv 1809.02839, section 3: momentum); PipeOptim (Guan et al.,
        arXiv 2312.00839: Adam, AdamW)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ...compression.errors import PlanError, StageError

Settings = dict[str, Any]


def _sgd(weight: Tensor, *, state: Settings, group: Settings, times: int) -> None:
    weight.sub_(state["momentum_buffer"], alpha=times * _rate(group))


def _adam(weight: Tensor, *, state: Settings, group: Settings, times: int) -> None:
    count, (beta1, beta2) = float(state["step"]), map(float, group["betas"])
    mean = state["exp_avg"]
    square = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    if weight.is_complex():
        weight, mean, square = map(torch.view_as_real, (weight, mean, square))
    root = (square.sqrt() / (1 - beta2**count) ** 0.5).add_(group["eps"])
    weight.addcdiv_(mean, root, value=-(times * _rate(group) / (1 - beta1**count)))


def _rate(group: Settings) -> float:
    return float(group["lr"]) * (-1 if group["maximize"] else 1)


STEPS: dict[type[Optimizer], Callable[..., None]] = {SGD: _sgd, Adam: _adam, AdamW: _adam}


class WeightPredictor:
    """Moves weights by steps that an optimizer is expected to make."""

    def __init__(self) -> None:
        """No optimizer is known yet."""
        self._optimizer: Optimizer | None = None

    def bind(self, optimizer: Optimizer) -> None:
        """Take ``optimizer``; raises PlanError if its steps cannot be predicted."""
        if type(optimizer) not in STEPS:
            raise PlanError(
                f"prediction knows {', '.join(kind.__name__ for kind in STEPS)}, found "
                f"{type(optimizer).__name__}; choose one of these, or prediction=false"
            )
        if any(not group.get("momentum", 1) for group in optimizer.param_groups):
            raise PlanError("prediction continues the momentum of SGD, found momentum=0; set one")
        self._optimizer = optimizer

    def moves(self, times: int) -> list[tuple[torch.nn.Parameter, Callable[[Tensor], None]]]:
        """The parameters that ``times`` more steps would move, each with what moves its values."""
        if not times:
            return []
        if self._optimizer is None:
            raise StageError("prediction reads an optimizer, found none; bind one before the first forward")
        step, states = STEPS[type(self._optimizer)], self._optimizer.state
        return [
            (p, functools.partial(step, state=states[p], group=group, times=times))
            for group in self._optimizer.param_groups
            for p in group["params"]
            if states.get(p) and states[p].get("momentum_buffer", 0) is not None
        ]
