"""An optimizer that takes its parameters in turns, a few of them near at a time, and whether it may.

It may if it treats every parameter by itself and counts nothing by its steps: then parts of its groups, one
after the other, come out as all of them at once. None says so; so each is tried on small parameters, as
``apart.py`` does for one optimizer per stage."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch.nn import Parameter
from torch.optim import Optimizer

from ...compression.errors import PlanError
from .apart import chosen, differ, stand_ins, trained
from .optimizers import Make, Named, make_optimizer, optimizer_like, random_kept, settings_of


class InTurn:
    """``made``, stepped turn by turn: its groups have the parameters of one turn only while it steps."""

    def __init__(self, made: Optimizer, turns: Sequence[Sequence[Parameter]]) -> None:
        """Every parameter of ``made`` is in one of the ``turns``."""
        self.made = made
        kinds = [{id(parameter) for parameter in turn} for turn in turns]
        groups = [group["params"] for group in made.param_groups]
        self._parts = [[[p for p in group if id(p) in kind] for group in groups] for kind in kinds]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of ``made``."""
        return self.made.param_groups

    @property
    def state(self) -> Mapping[Any, Any]:
        """That of ``made``."""
        return self.made.state

    def step_of(self, turn: int) -> None:
        """Update the parameters of one turn, if the optimizer has any of them."""
        parts, groups = self._parts[turn], self.made.param_groups
        if not any(parts):
            return
        whole = [group["params"] for group in groups]
        try:
            for group, part in zip(groups, parts, strict=True):
                group["params"] = part
            self.made.step()
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params

    def step(self) -> None:
        """Update all turns."""
        for turn in range(len(self._parts)):
            self.step_of(turn)


def check_in_turn(optimizer: Make, named: Named, turn_of: Mapping[str, int], made: Optimizer) -> None:
    """Refuse an optimizer that does something else with all its parameters than turn by turn.

    Args:    named: the parameters of one stage; ``made``: its optimizer.
    Raises:  PlanError: it does, or somebody counts its steps. A warning says that it could not be tried."""
    kind = type(made).__name__
    if made._optimizer_step_pre_hooks or made._optimizer_step_post_hooks:
        raise PlanError(
            f"with a mirror of the parameters an optimizer steps once for every layer, and {kind} has hooks "
            "on its steps; remove them, or leave parameters on the device"
        )

    def like(pairs: Named) -> Optimizer | None:
        """Another of the same class, whatever the function that made it takes."""
        mine = dict(pairs)
        names = {id(parameter): name for name, parameter in named}
        groups = [(settings_of(g), [mine[names[id(p)]] for p in g["params"]]) for g in made.param_groups]
        return optimizer_like(made, groups)

    unknown: Exception | None = None
    with random_kept():
        for make in (lambda pairs: make_optimizer(optimizer, pairs), like):
            try:
                found = _differs(make, named, turn_of)
            except Exception as error:  # whatever a person's function raises for parameters it never saw
                unknown = error
                continue
            if found:
                raise PlanError(
                    "with a mirror of the parameters an optimizer works on one layer's at a time and "
                    f"{kind} looks at all together: {found} is updated otherwise than in turn; use SGD or "
                    "Adam, or leave parameters on the device"
                )
            return
    warnings.warn(
        f"whether {kind} treats every parameter by itself could not be tried on small ones "
        f"({type(unknown).__name__}: {unknown}); if it does not, a mirror of the parameters trains otherwise "
        "than the plain loop",
        stacklevel=3,
    )


def _differs(make: Any, named: Named, turn_of: Mapping[str, int]) -> str:
    """The first parameter that comes out otherwise in turn, "" for none."""
    together, own = stand_ins(named), stand_ins(named)
    joint, parted = make(together), make(own)
    if joint is None or parted is None:
        return ""
    turns: dict[int, list[Parameter]] = {}
    for name, parameter in own:
        turns.setdefault(turn_of[name], []).append(parameter)
    tried = chosen(joint, together, turn_of)
    expected, found = trained(joint, together, tried), trained(InTurn(parted, [*turns.values()]), own, tried)
    return next((name for name in expected if differ(expected[name], found[name])), "")
