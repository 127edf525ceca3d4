"""The update of the weights: one optimizer per stage, and clipping by the norm over all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..compression.errors import PlanError
from . import group

Named = list[tuple[str, torch.nn.Parameter]]


class Update:
    """Optimizers (and schedulers) of this process's stages.

    Args:    parameters: per stage its (name, parameter) pairs.
             dtypes: the dtype of every parameter of the model by name, in the model's own order.
             owner: the rank that owns each of them.
             clip: largest global L2 norm of the gradients, or None."""

    def __init__(
        self,
        *,
        parameters: Mapping[int, Named],
        dtypes: Mapping[str, torch.dtype],
        owner: Mapping[str, int],
        optimizer: Callable[[Named], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler] | None,
        clip: float | None,
    ) -> None:
        self.named = {name: parameter for named in parameters.values() for name, parameter in named}
        self.names = {id(parameter): name for name, parameter in self.named.items()}
        self.dtypes, self.owner, self.clip = dtypes, owner, clip
        self.optimizers = {
            stage: made for stage, named in parameters.items() if (made := _make(optimizer, named))
        }
        self.schedulers = (
            {stage: scheduler(made) for stage, made in self.optimizers.items()} if scheduler else {}
        )
        self.clipped = False

    def begin(self) -> None:
        """Start the gradients from None: sums that start from zeros lose -0.0."""
        self.clipped = False
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    def step(self, stage: int) -> None:
        """Update the weights of ``stage``; the first stage of a process clips for all of them."""
        if self.clip is not None and not self.clipped:
            self._clip(self.clip)
            self.clipped = True
        if stage in self.optimizers:
            self.optimizers[stage].step()
        if stage in self.schedulers:
            self.schedulers[stage].step()

    def _clip(self, largest: float) -> None:
        """Norms per parameter, put together in the model's own order: the bits of clip_grad_norm_."""
        gradients = {name: p.grad for name, p in self.named.items() if p.grad is not None}
        mine = [
            (1.0, float(torch.linalg.vector_norm(gradients[name]))) if name in gradients else (0.0, 0.0)
            for name in self.dtypes
        ]
        everybody = group.exchange([number for pair in mine for number in pair])
        norms: dict[torch.dtype, list[torch.Tensor]] = {}
        for i, name in enumerate(self.dtypes):
            found, norm = everybody[self.owner[name]][2 * i : 2 * i + 2]
            if found:
                norms.setdefault(self.dtypes[name], []).append(torch.tensor(norm, dtype=self.dtypes[name]))
        if norms:
            total = torch.linalg.vector_norm(torch.stack([norm for same in norms.values() for norm in same]))
            torch.nn.utils.clip_grads_with_norm_(list(self.named.values()), largest, total)

    def state(self) -> dict[str, dict[str, Any]]:
        """Per parameter name: the optimizer's state of it, and the hyper-parameters of its group."""
        found: dict[str, dict[str, Any]] = {}
        for optimizer in self.optimizers.values():
            for settings in optimizer.param_groups:
                hyper = {k: v for k, v in settings.items() if k not in ("params", "param_names")}
                for parameter in settings["params"]:
                    found[self.names[id(parameter)]] = {
                        "state": dict(optimizer.state.get(parameter, {})),
                        "group": hyper,
                    }
        return found

    def scheduler_state(self) -> dict[str, Any] | None:
        """The state of a scheduler (they all keep step), as far as JSON can say it."""
        for scheduler in self.schedulers.values():
            state = scheduler.state_dict().items()
            return {k: v for k, v in state if isinstance(v, bool | int | float | str | list | None)}
        return None

    def load(self, state: Mapping[str, Mapping[str, Any]], scheduler: Mapping[str, Any] | None) -> None:
        """Take over what ``state`` and ``scheduler_state`` returned, for the parameters of this process."""
        for ours in self.schedulers.values():
            if scheduler is None:
                raise PlanError(
                    "this pipeline has a scheduler and the state has none; load it without a scheduler"
                )
            ours.load_state_dict({k: v for k, v in scheduler.items() if k != "base_lrs"})
        for optimizer in self.optimizers.values():
            for settings in optimizer.param_groups:
                for parameter in settings["params"]:
                    kept = state.get(self.names[id(parameter)])
                    if kept is None:
                        continue
                    settings.update(kept["group"])
                    fresh = {
                        k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in kept["state"].items()
                    }
                    optimizer.state[parameter] = fresh


def _make(
    optimizer: Callable[[Named], Optimizer], named: Iterable[tuple[str, torch.nn.Parameter]]
) -> Optimizer | None:
    pairs = list(named)
    if not pairs:
        return None
    try:
        made = optimizer(pairs)
    except ValueError as error:
        if "empty parameter list" in str(error):  # the caller's choice of names leaves nothing on this stage
            return None
        raise PlanError(
            f"the optimizer of a stage cannot be made: {error}; leave out groups that are empty"
        ) from error
    if not isinstance(made, Optimizer):
        raise PlanError(
            f"optimizer makes a torch optimizer from (name, parameter) pairs, found {type(made).__name__}"
        )
    given = {id(parameter) for _, parameter in pairs}
    if any(id(parameter) not in given for group in made.param_groups for parameter in group["params"]):
        raise PlanError(
            "an optimizer takes parameters of its own stage only; make it from the pairs it is given"
        )
    if isinstance(made, LBFGS):
        raise PlanError(
            "an optimizer works on one stage's parameters at a time and LBFGS needs all at once; use SGD or "
            "Adam"
        )
    return made
