"""One scheduler of torch for the optimizers of all stages: stepped once a step, as in the plain loop.

It is made on an optimizer of all parameters, which never updates, and what it sets there is handed to the
stages. So its functions count and draw as in the plain loop, and its state does not depend on the cuts.
"""

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...compression.errors import PlanError
from .optimizers import Make, Named, make_optimizer, settings_of
from .state_checks import is_plain, kind_of

MakeScheduler = Callable[[Optimizer], LRScheduler]
Settings = dict[str, Any]

_OF_GROUPS = ("base_lrs", "max_lrs", "base_momentums", "max_momentums")
"""What torch's schedulers were given for each group, so their constructor has it."""

_GIVEN = (*_OF_GROUPS, "_last_lr", "milestones")  # or what the optimizer has


class SharedScheduler:
    """A scheduler of the whole model, ``made``, and the optimizers of this process's stages, which may step
    apart; ``num_steps``: by stage how many of its updates it has followed."""

    def __init__(
        self, scheduler: MakeScheduler, optimizer: Make, *, named: Named, stages: Mapping[int, Optimizer]
    ) -> None:
        """Make it, and hand the ``stages``, which are those here, what it sets at once; ``named``: of all
        ranks."""
        whole = make_optimizer(optimizer, named)
        assert whole is not None, "a stage has an optimizer"
        whole.state.clear()  # some optimizers begin with tensors
        place = {id(p): number for number, group in enumerate(whole.param_groups) for p in group["params"]}
        self._whole, self._stages = whole, stages
        self._places = {
            stage: [(place[id(g["params"][0])], n) for n, g in enumerate(made.param_groups) if g["params"]]
            for stage, made in stages.items()
        }
        for group in [group for made in (whole, *stages.values()) for group in made.param_groups]:
            group |= _copied(group)  # a rate that is a tensor would be one for all of them
        before = [_copied(group) for group in whole.param_groups]
        self.made = scheduler(whole)
        if isinstance(self.made, ReduceLROnPlateau) or not callable(getattr(self.made, "step", None)):
            raise PlanError(
                "scheduler makes what is stepped after every update without arguments, found "
                f"{type(self.made).__name__}; use one such as StepLR or LambdaLR"
            )
        whole._opt_called = True  # pyright: ignore[reportAttributeAccessIssue] (stages step, this does not)
        self.num_steps = dict.fromkeys(stages, 0)
        self._changes = {0: self._changed(before)}
        for stage in stages:
            self._hand(stage)

    def step(self, stage: int) -> None:
        """Set what follows the update of ``stage``; the first stage to get there has the scheduler step."""
        self.num_steps[stage] += 1
        number = self.num_steps[stage]
        if number not in self._changes:
            self._take(stage)
            before = [_copied(group) for group in self._whole.param_groups]
            self.made.step()
            self._changes[number] = self._changed(before)
        self._hand(stage)
        for old in [old for old in self._changes if old < min(self.num_steps.values())]:
            del self._changes[old]

    def state(self) -> dict[str, Any]:
        """Its state, as JSON says it; raises PlanError where it keeps something else."""
        kept = _without(self.made.state_dict(), _GIVEN, unless=is_plain)
        for name, value in kept.items():
            if not is_plain(value):
                raise PlanError(
                    f"a state holds plain values, and {type(self.made).__name__} keeps {name} as "
                    f"{kind_of(value)} with something else in it; give it numbers, no tensors"
                )
        return copy.deepcopy(kept)

    def load(self, state: object) -> None:
        """Take over what ``state`` returned; the optimizers of the stages have taken over theirs."""
        for stage in self._stages:
            self._take(stage)
        self.made.load_state_dict(_without(state, _OF_GROUPS))
        self.made._last_lr = [float(group["lr"]) for group in self._whole.param_groups]
        self.num_steps = dict.fromkeys(self._stages, 0)
        self._changes = {0: [{} for _ in self._whole.param_groups]}

    def _take(self, stage: int) -> None:
        """Copy a stage's settings to the optimizer of the whole model; the stage's optimizer may set some."""
        for place, number in self._places[stage]:
            _set(self._whole.param_groups[place], settings_of(self._stages[stage].param_groups[number]))

    def _hand(self, stage: int) -> None:
        """Set in the optimizer of a stage what the scheduler changed."""
        for place, number in self._places[stage]:
            _set(self._stages[stage].param_groups[number], self._changes[self.num_steps[stage]][place])

    def _changed(self, before: list[Settings]) -> list[Settings]:
        """By group what the scheduler changed."""
        return [
            {k: v for k, v in _copied(group).items() if k not in then or not _same(then[k], v)}
            for then, group in zip(before, self._whole.param_groups, strict=True)
        ]


def _copied(group: Mapping[str, Any]) -> Settings:
    return copy.deepcopy(settings_of(group))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def _set(group: dict[str, Any], settings: Mapping[str, Any]) -> None:
    """Write into the tensors that are there: a compiled or captured optimizer reads these."""
    for key, value in settings.items():
        if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
            group[key].copy_(value)
        else:
            group[key] = copy.deepcopy(value)


def _without(state: Any, keys: Collection[str], unless: Callable[[object], bool] = lambda _: False) -> Any:
    """A state, and those of schedulers in it, without ``keys`` but for values that may stay."""
    if isinstance(state, list | tuple):
        return [_without(each, keys, unless) for each in state]
    if isinstance(state, Mapping):
        return {k: _without(v, keys, unless) for k, v in state.items() if k not in keys or unless(v)}
    return state
