"""What a state must be before a byte of it is taken over; each refusal is a PlanError.

A state comes from a file that others may have written, so nothing of it is trusted to have the type, the
shape or the range that ``state_dict`` gave it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ...compression.errors import PlanError
from ...stages.tracing.comparison import same_bits
from .kinds import OURS, alike, check_tensor, is_count, is_number, is_plain, kind_of


def check_parts(state: object) -> Mapping[str, Any]:
    """The state as a mapping with its parts."""
    if not isinstance(state, Mapping):
        raise PlanError(f"a state is a dict from state_dict, found {type(state).__name__}; pass that dict")
    if missing := {"model", "optimizer", "step"} - set(state):
        found = ", ".join(map(str, state)) or "none"
        raise PlanError(
            f"a state has the keys model, optimizer and step, found {found}; {min(missing)} is missing, take "
            "one from state_dict"
        )
    if not isinstance(state.get("optimizer_class"), str | None):
        raise PlanError(
            f"optimizer_class of a state is a name, found {kind_of(state['optimizer_class'])}; {OURS}"
        )
    for part in ("model", "optimizer"):
        if not isinstance(state[part], Mapping):
            raise PlanError(f"{part} of a state is a dict by name, found {kind_of(state[part])}; {OURS}")
    if not is_count(state["step"]):
        raise PlanError(
            f"step of a state is a whole number from 0, found {kind_of(state['step'])} "
            f"{state['step']!r:.40}; {OURS}"
        )
    return state


def check_keys(found: Collection[str], expected: Collection[str]) -> None:
    """The model has the tensors that the state has."""
    if strange := sorted(map(str, set(expected) ^ set(found))):
        raise PlanError(f"a state belongs to the model it was taken from; {strange[0]} is not in both")


def check_model(
    found: Mapping[str, Any], expected: Mapping[str, torch.Tensor], shared: Mapping[str, str]
) -> None:
    """Every tensor that is expected, under its name, with its shape and dtype.

    Args:    expected: may be on the meta device.
             shared: for every further name of a tensor its first one."""
    for key, ours in expected.items():
        check_tensor(f"{key} of the model", ours, found[key])
    for key, first in shared.items():
        if not same_bits(found[key], found[first]):
            raise PlanError(
                f"{key} and {first} are one tensor of the model, and the state has two unlike ones; {OURS}"
            )


def check_names(found: Collection[str], expected: set[str]) -> None:
    """The optimizers of all ranks have the parameters that the state has something of."""
    if strange := sorted(map(str, expected ^ set(found))):
        where = "the optimizer" if strange[0] in expected else "the state"
        raise PlanError(
            f"a state belongs to the optimizer it was taken from; {strange[0]} is a parameter of {where} only"
        )


def check_scheduler(ours: LRScheduler | None, theirs: object) -> None:
    """The course of the learning rate; without a scheduler here it may be any scheduler's."""
    if theirs is None and ours is not None:
        raise PlanError("this pipeline has a scheduler and the state has none; load it without a scheduler")
    if theirs is None:
        return
    known = None if ours is None else {k: v for k, v in ours.state_dict().items() if is_plain(v)}
    is_course = isinstance(theirs, Mapping) and not {"last_epoch", "_schedulers"}.isdisjoint(theirs)
    if not isinstance(theirs, Mapping) or not is_course or not is_plain(dict(theirs)):
        found = f" with {', '.join(map(str, theirs))}" if isinstance(theirs, Mapping) else ""
        raise PlanError(
            f"scheduler of a state is a dict with last_epoch, found {kind_of(theirs)}{found}; {OURS}"
        )
    for key in ("last_epoch", "_step_count"):
        if key in theirs and not (is_count(theirs[key]) or theirs[key] == -1):
            raise PlanError(f"{key} of the scheduler is a whole number, found {theirs[key]!r:.40}; {OURS}")
    if known is None:
        return
    if strange := sorted(map(str, set(known) ^ set(theirs))):
        raise PlanError(
            f"a state belongs to the scheduler it was taken from; {strange[0]} is not in both, this is "
            f"{type(ours).__name__}; give the same one"
        )
    for key, value in known.items():
        if not alike(value, theirs[key]):
            raise PlanError(
                f"{key} of the scheduler is of kind {kind_of(value)}, found {kind_of(theirs[key])}; {OURS}"
            )


def check_scaler(theirs: object, *, needed: bool) -> None:
    """The numbers of a GradScaler, in the ranges that its constructor takes."""
    if theirs is None and needed:
        raise PlanError(
            "this pipeline has a GradScaler and the state has none; load it with scaler=None or a number"
        )
    if theirs is None:
        return
    ranges = {
        "scale": lambda n: 0 < n < math.inf,
        "growth_factor": lambda n: 1 < n < math.inf,
        "backoff_factor": lambda n: 0 < n < 1,
        "growth_interval": lambda n: is_count(n) and n > 0,
        "_growth_tracker": is_count,
    }
    if not isinstance(theirs, Mapping) or set(theirs) != set(ranges):
        raise PlanError(
            f"scaler of a state is a dict with {', '.join(ranges)}, found {kind_of(theirs)}"
            f"{' with ' + ', '.join(map(str, theirs)) if isinstance(theirs, Mapping) else ''}; {OURS}"
        )
    for key, fits in ranges.items():
        if not is_number(theirs[key]) or not fits(theirs[key]):
            raise PlanError(f"{key} of the scaler is out of its range, found {theirs[key]!r:.40}; {OURS}")
