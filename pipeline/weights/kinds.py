"""The kinds of value that a state is made of: dense tensors, numbers, and what else JSON can say."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ...compression.errors import PlanError

OURS = "take it from state_dict of the same training"


def is_plain(value: object) -> bool:
    """Whether JSON can say it."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, bool | int | float | str)


def is_number(value: object) -> bool:
    """Whether it is a real number."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: object) -> bool:
    """Whether it is a whole number from 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def alike(ours: object, theirs: object) -> bool:
    """Whether a plain value or a tensor is of the same kind; a number is one."""
    if isinstance(ours, torch.Tensor) or isinstance(theirs, torch.Tensor):
        both = isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)
        return both and (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)  # type: ignore[union-attr]
    if ours is None or theirs is None:
        return is_plain(theirs)
    if is_number(ours) or is_number(theirs):
        return is_number(ours) and is_number(theirs) and not math.isnan(theirs)  # type: ignore[arg-type]
    if isinstance(ours, tuple) and isinstance(theirs, list | tuple) and len(ours) != len(theirs):
        return False
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return not ours or not theirs or all(alike(a, b) for a, b in zip(ours, theirs, strict=False))
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return set(ours) == set(theirs) and all(alike(ours[key], theirs[key]) for key in ours)
    return type(ours) is type(theirs)


def check_tensor(where: str, ours: torch.Tensor, theirs: object) -> None:
    """A dense tensor of the shape and dtype of ``ours``, which may be on the meta device."""
    check_real(where, theirs)
    assert isinstance(theirs, torch.Tensor)
    for what, of in (("shape", lambda t: tuple(t.shape)), ("dtype", lambda t: t.dtype)):
        if of(ours) != of(theirs):
            raise PlanError(f"{where} has {what} {of(ours)}, the state {of(theirs)}; {OURS}")


def check_real(where: str, found: object) -> None:
    """A tensor whose elements are there to be copied."""
    strange = "" if isinstance(found, torch.Tensor) else kind_of(found)
    if isinstance(found, torch.Tensor):
        if type(found) not in (torch.Tensor, torch.nn.Parameter):
            strange = f"a {type(found).__name__}"
        elif found.layout != torch.strided or found.is_quantized or found.is_meta:
            strange = "a meta tensor" if found.is_meta else "a sparse or quantised one"
    if strange:
        raise PlanError(f"{where} of a state is a dense tensor, found {strange}; {OURS}")


def kind_of(value: object) -> str:
    """How a refusal calls what it found."""
    return type(value).__name__
