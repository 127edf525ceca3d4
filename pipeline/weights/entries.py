"""What an optimizer keeps of a parameter, known before its first step: a copy of it is watched.

A state can so be checked entry by entry before anything of it is taken over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ...stages.device import CPU
from .optimizers import Make, make_optimizer, optimizer_like, random_kept

NUM_UPDATES = 8  # some entries come only after a few


class Entries:
    """The entries that ``made`` keeps, by hyper-parameters and kind of parameter, each kind watched once.

    Args:    optimizer: the function that made it, for a class that its own defaults do not make."""

    def __init__(self, optimizer: Make, made: Optimizer) -> None:
        self.optimizer, self.made = optimizer, made
        self.seen: dict[object, list[dict[str, Any]]] = {}

    def of(self, name: str, like: torch.Tensor, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The entries of a parameter like this one before the first update and after each of a few; [] if
        that is not known.

        Tensors of them may be on the meta device: only dtype and shape count."""
        key = (tuple(like.shape), like.dtype, repr(settings))
        if key not in self.seen:
            self.seen[key] = self._watched(name, like, settings)
        return self.seen[key]

    def _watched(self, name: str, like: torch.Tensor, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        for device, by_class in (("meta", True), (CPU, True), (CPU, False)):
            parameter = torch.nn.Parameter(torch.zeros(like.shape, dtype=like.dtype, device=device))
            try:
                with random_kept():
                    return self._after_updates(name, parameter, settings, by_class=by_class)
            except Exception:  # a rule that reads values fails on meta, a class may take other arguments
                continue
        return []

    def _after_updates(
        self, name: str, parameter: torch.nn.Parameter, settings: Mapping[str, Any], *, by_class: bool
    ) -> list[dict[str, Any]]:
        if by_class:
            made = optimizer_like(self.made, [(settings, [parameter])])
        else:
            made = make_optimizer(self.optimizer, [(name, parameter)])
            for group in made.param_groups if made else ():
                group.update(settings)
        if made is None:
            return []
        found = [dict(made.state.get(parameter, {}))]
        for _ in range(NUM_UPDATES):
            parameter.grad = torch.ones_like(parameter)
            made.step()
            found.append(dict(made.state.get(parameter, {})))
        return found
