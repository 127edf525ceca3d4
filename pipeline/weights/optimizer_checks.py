"""What a state must say of an optimizer before it is taken over: its class, hyper-parameters and entries.

What an optimizer keeps is seen on a copy of it, as its own state is empty before its first step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ...compression.errors import PlanError
from ...stages.memory.tensor_memory import TensorMemory
from .entries import Entries
from .kinds import OURS, alike, check_real, check_tensor, is_number, is_plain, kind_of
from .optimizers import refusal_of, settings_of


def saved_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters that a state carries: tensors, and what JSON can say."""
    return {k: v for k, v in settings_of(group).items() if isinstance(v, torch.Tensor) or is_plain(v)}


def check_optimizer(
    state: Mapping[str, Any],
    made: Optimizer,
    names: Mapping[int, str],
    entries: Entries,
    *,
    away: Mapping[int, TensorMemory],
) -> None:
    """The parameters of one optimizer: its class, its hyper-parameters, what it keeps of each.

    Args:    names: of its parameters, by identity; ``away``: where those are that are not near."""
    kind, theirs = type(made).__name__, state.get("optimizer_class")
    if theirs is not None and kind not in theirs.split(", "):
        raise PlanError(
            f"a state belongs to the optimizer it was taken from, {theirs!s:.80}, and this is {kind}; give "
            "the same one"
        )
    for group in made.param_groups:
        mine = {names[id(p)]: away[id(p)].like if id(p) in away else p for p in group["params"]}
        found = {name: state["optimizer"][name] for name in mine if name in state["optimizer"]}
        for name, kept in found.items():  # what is missing all ranks find together
            first = next(iter(found.values()))["group"]
            _check_settings(name, made, group, kept["group"], scheduled=state.get("scheduler") is not None)
            if _text(first) != _text(kept["group"]):
                raise PlanError(
                    f"the optimizer has {name} in one group with others, and the state has other "
                    "hyper-parameters for it; make the groups as in the training it was taken from"
                )
            known = entries.of(name, mine[name], {**settings_of(group), **first})
            _check_entries(name, known, kept["state"])


def check_kept(name: str, kept: object) -> None:
    """What a state has of one parameter's optimizer, whichever that is: real tensors and plain values."""
    parts = [kept.get(part) for part in ("state", "group")] if isinstance(kept, Mapping) else [kept]
    if not isinstance(kept, Mapping) or not all(isinstance(part, Mapping) for part in parts):
        raise PlanError(
            f"the optimizer of a state has two dicts for {name}, state and group, found "
            f"{' and '.join(map(kind_of, parts))}; {OURS}"
        )
    for part in ("state", "group"):
        for key, value in kept[part].items():
            where = f"{key} of {name} in the optimizer"
            if isinstance(value, torch.Tensor):
                check_real(where, value)
            elif not isinstance(key, str) or not is_plain(value):
                raise PlanError(f"{where} is a tensor or a plain value, found {kind_of(value)}; {OURS}")
    steps = kept["state"].get("step", 0)
    if isinstance(steps, torch.Tensor) and steps.numel() == 1 and not steps.is_complex():
        steps = steps.item()
    if isinstance(steps, float | int) and not 0 <= steps < math.inf:
        raise PlanError(f"step of {name} in the optimizer is a number from 0, found {steps}; {OURS}")


def _check_settings(
    name: str, made: Optimizer, group: Mapping[str, Any], theirs: Mapping[str, Any], *, scheduled: bool
) -> None:
    """``scheduled``: the state comes with a scheduler, which leaves numbers in the groups."""
    ours = saved_settings(group)
    for key in sorted(set(ours) ^ set(theirs)):
        if key in ours or not (scheduled and is_number(_number(theirs[key]))):
            raise PlanError(
                f"a state belongs to the optimizer it was taken from; the hyper-parameter {key} of {name} is "
                "not in both; give the same one"
            )
    for key, value in ours.items():
        if not alike(_number(value), _number(theirs[key])):
            raise PlanError(
                f"the hyper-parameter {key} of {name} is of kind {kind_of(value)}, as in {value!s:.40}, "
                f"found {kind_of(theirs[key])} {theirs[key]!r:.40}; {OURS}"
            )
    if (said := refusal_of(made, theirs)) and not refusal_of(made, ours):
        raise PlanError(f"{type(made).__name__} refuses the hyper-parameters of {name}: {said}; {OURS}")


def _number(value: Any) -> Any:
    """A tensor of one real number as that number: a learning rate may be either."""
    real = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
    return value.item() if real else value


def _check_entries(name: str, known: list[dict[str, Any]], theirs: Mapping[str, Any]) -> None:
    """``known``: the entries after each of a few updates; one of them has the names of ``theirs``."""
    if not known:
        return
    ours = next((each for each in known if set(each) == set(theirs)), known[-1])
    if strange := sorted(map(str, set(ours) ^ set(theirs))):
        where = "missing in the state" if strange[0] in ours else "not of this optimizer"
        raise PlanError(
            f"the optimizer keeps {', '.join(ours) or 'nothing'} of {name}, and {strange[0]} is {where}; "
            f"{OURS}"
        )
    for key, value in ours.items():
        where = f"{key} of {name} in the optimizer"
        if isinstance(value, torch.Tensor):
            check_tensor(where, value, theirs[key])
        elif not alike(value, theirs[key]):
            raise PlanError(
                f"{where} is of kind {kind_of(value)}, the state's is {kind_of(theirs[key])}; {OURS}"
            )


def _text(settings: Mapping[str, Any]) -> str:
    plain = {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in settings.items()}
    return repr(sorted(plain.items()))
