"""Checks of a state before a byte of it is taken over; each refusal is a PlanError.

A state comes from a file that others may have written. Its keys, shapes and dtypes, and the kinds of its
plain values, are compared with those of this training; what the numbers say is not checked."""

import inspect
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ...compression.errors import PlanError
from ...stages.device import CPU
from ...stages.memory.evictable_tensor import EvictableTensor
from ...stages.tracing.verify import same_bits
from .optimizers import random_kept, settings_of
from .separability import SEPARABLE

OURS = "take it from state_dict of the same training"


def is_plain(value: object) -> bool:
    """True if JSON can hold it."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def kind_of(value: object) -> str:
    """Name a value's kind in a refusal."""
    return type(value).__name__


def check_like(where: str, ours: object, theirs: Any) -> None:
    """Refuse other keys, shapes, dtypes and kinds of values than ours, which may be on the meta device."""
    if isinstance(ours, torch.Tensor):
        check_real(where, theirs)
        for what, of in (("shape", lambda t: tuple(t.shape)), ("dtype", lambda t: t.dtype)):
            if of(ours) != of(theirs):
                raise PlanError(f"{where} has {what} {of(ours)}, the state {of(theirs)}; {OURS}")
    elif isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        if strange := sorted(map(str, set(ours) ^ set(theirs))):
            owner = "this training" if strange[0] in ours else "the state"
            raise PlanError(f"{strange[0]} of {where} is in {owner} only; {OURS}")
        for key, value in ours.items():
            check_like(f"{key} of {where}", value, theirs[key])
    elif not _is_alike(ours, theirs):
        raise PlanError(
            f"{where} is of kind {kind_of(ours)}, as in {ours!s:.40}, found {kind_of(theirs)} "
            f"{theirs!r:.40}; {OURS}"
        )


def _is_alike(ours: object, theirs: object) -> bool:
    if _is_number(ours):
        return _is_number(theirs) and not math.isnan(theirs)  # type: ignore[arg-type]
    if ours is None or theirs is None:
        return is_plain(theirs)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):  # JSON has no tuples
        return is_plain(theirs) and (isinstance(ours, list) or len(ours) == len(theirs))
    return type(ours) is type(theirs)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_real(where: str, found: object) -> None:
    """A tensor whose elements are there to be copied."""
    if not isinstance(found, torch.Tensor):
        strange = kind_of(found)
    elif type(found) not in (torch.Tensor, torch.nn.Parameter):
        strange = f"a {kind_of(found)}"
    elif found.is_meta or found.layout != torch.strided or found.is_quantized:
        strange = "a meta tensor" if found.is_meta else "a sparse or quantised one"
    else:
        return
    raise PlanError(f"{where} of a state is a dense tensor, found {strange}; {OURS}")


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
        found = kind_of(state["optimizer_class"])
        raise PlanError(f"optimizer_class of a state is a name, found {found}; {OURS}")
    for part in ("model", "optimizer"):
        if not isinstance(state[part], Mapping):
            raise PlanError(f"{part} of a state is a dict by name, found {kind_of(state[part])}; {OURS}")
    if type(state["step"]) is not int or state["step"] < 0:
        found = f"{kind_of(state['step'])} {state['step']!r:.40}"
        raise PlanError(f"step of a state is a whole number from 0, found {found}; {OURS}")
    return state


def check_names(what: str, theirs: Collection[str], ours: Collection[str]) -> None:
    """Refuse other tensors of the model, or other parameters of the optimizers of all ranks, than ours."""
    if strange := sorted(map(str, set(ours) ^ set(theirs))):
        where = "this training" if strange[0] in ours else "the state"
        raise PlanError(f"a state belongs to the {what} it was taken from; {strange[0]} is in {where} only")


def check_model(
    found: Mapping[str, Any], expected: Mapping[str, torch.Tensor], shared: Mapping[str, str]
) -> None:
    """Every tensor that is expected, with its shape and dtype; ``expected`` may be on the meta device,
    ``shared`` has for every further name of a tensor its first one."""
    for key, ours in expected.items():
        check_like(f"{key} of the model", ours, found[key])
    for key, first in shared.items():
        if not same_bits(found[key], found[first]):
            raise PlanError(
                f"{key} and {first} are one tensor of the model, and the state has two unlike ones; {OURS}"
            )


def check_part(what: str, ours: Mapping[str, Any] | None, theirs: object) -> None:
    """Check the state of the scheduler or the GradScaler; without one here (None) it may be any."""
    if theirs is None and ours is not None:
        raise PlanError(f"this pipeline has a {what} and the state has none; load it without a {what}")
    if ours is not None:
        check_like(f"the {what}", ours, theirs)


def saved_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The hyper-parameters that a state carries: tensors, and what JSON can say."""
    return {k: v for k, v in settings_of(group).items() if isinstance(v, torch.Tensor) or is_plain(v)}


def check_kept(name: str, kept: object) -> None:
    """Check one parameter's state of any optimizer: real tensors and plain values."""
    parts = [kept.get(part) for part in ("state", "group")] if isinstance(kept, Mapping) else [kept]
    if not isinstance(kept, Mapping) or not all(isinstance(part, Mapping) for part in parts):
        found = " and ".join(map(kind_of, parts))
        raise PlanError(
            f"the optimizer of a state has two dicts for {name}, state and group, found {found}; {OURS}"
        )
    for key, value in (*kept["state"].items(), *kept["group"].items()):
        where = f"{key} of {name} in the optimizer"
        if isinstance(value, torch.Tensor):
            check_real(where, value)
        elif not isinstance(key, str) or not is_plain(value):
            raise PlanError(f"{where} is a tensor or a plain value, found {kind_of(value)}; {OURS}")


def check_optimizer(
    state: Mapping[str, Any],
    made: Optimizer,
    names: Mapping[int, str],
    *,
    away: Mapping[int, EvictableTensor],
) -> None:
    """Refuse a state that one optimizer does not have: its class, its hyper-parameters, its entries."""
    kind, name_of_class = type(made).__name__, state.get("optimizer_class")
    if name_of_class is not None and kind not in name_of_class.split(", "):
        raise PlanError(
            f"a state belongs to the optimizer it was taken from, {name_of_class!s:.80}, and this is {kind}; "
            "give the same one"
        )
    known: dict[object, list[dict[str, Any]]] = {}
    for group in made.param_groups:
        ours = {k: _number(v) for k, v in saved_settings(group).items()}
        first = ""
        for p in group["params"]:
            name, like = names[id(p)], away[id(p)].like if id(p) in away else p
            if (kept := state["optimizer"].get(name)) is None:
                continue  # all ranks together find what is missing
            where = f"{name} in the optimizer"
            # 1. the hyper-parameters, in which a scheduler may have left numbers
            theirs = {k: _number(v) for k, v in kept["group"].items()}
            if state.get("scheduler") is not None:
                theirs = {k: v for k, v in theirs.items() if k in ours or not _is_number(v)}
            check_like(where, ours, theirs)
            text = repr(sorted(theirs.items()))
            first = first or text
            if text != first:
                raise PlanError(
                    f"the optimizer has {name} in one group with others, and the state has other "
                    "hyper-parameters for it; make the groups as in the training it was taken from"
                )
            # 2. the entries: none is from before the first update
            key = like.shape, like.dtype, text
            if key not in known:
                known[key] = _entries(made, like, {**settings_of(group), **kept["group"]})
            if known[key] and (kept["state"] or known[key][0]):
                entries = known[key][-1]
                if type(made) not in SEPARABLE:  # it may keep more after a few updates
                    entries = {k: v for k, v in kept["state"].items() if k not in entries} | entries
                check_like(where, entries, kept["state"])


def _entries(made: Optimizer, like: torch.Tensor, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Entries that a copy of ``made`` keeps of such a parameter before and after an update; none without a
    copy."""
    takes = inspect.signature(type(made)).parameters
    defaults = {key: value for key, value in {**made.defaults, **settings}.items() if key in takes}
    for device in ("meta", CPU):
        parameter = torch.nn.Parameter(torch.zeros(like.shape, dtype=like.dtype, device=device))
        try:
            with random_kept():
                copy: Any = type(made)([{**settings, "params": [parameter]}], **defaults)
                before = dict(copy.state.get(parameter, {}))
                parameter.grad = torch.ones_like(parameter)
                copy.step()
                return [before, dict(copy.state.get(parameter, {}))]
        except Exception:  # a rule that reads values fails on meta, a class may take other arguments
            continue
    return []


def _number(value: Any) -> Any:
    """A tensor of one real number as that number: a learning rate may be either."""
    real = isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()
    return value.item() if real else value
