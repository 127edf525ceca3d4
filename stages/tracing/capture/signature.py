"""Signature: how a model is called, as data that a plan carries to ranks that never saw its example.

A rank traces with inputs that it makes itself (``examples.py``), so they have what a forward may ask for:
names, shapes, flags between them, and integers that were there (an index beyond a table is an error, and a
label of -100 is none)."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any

from ....compression.errors import PlanError

PLAIN = (bool, int, float, str, type(None))


class ArgumentPlace(int):
    """Number of a tensor of a call, in its place among the arguments."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """``form``: (args, kwargs) as JSON, with {"tensor": n} for tensor n, {"tuple": [...]} and {"dict":
    {...}}.

    For each tensor its name, whether it is a ``Constant`` (``whole``), and ``values`` that its integers or
    bools had; none of other dtypes.
    Raises:  PlanError: the fields contradict each other."""

    form: str
    names: tuple[str, ...]
    whole: tuple[bool, ...]
    values: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not len(self.whole) == len(self.values) == len(self.names):
            raise PlanError("a signature has a name, flag and values for each tensor; make the plan anew")
        for value in itertools.chain(*self.values):
            if not -(2**63) <= value < 2**63:
                raise PlanError(f"an input holds integers of 64 bits, found {value}; make the plan anew")
        self.arguments([None] * len(self.names))

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with these tensors; PlanError if the form is none."""
        try:
            args, kwargs = (_decoded(item, tensors) for item in json.loads(self.form))
            if isinstance(args, tuple) and isinstance(kwargs, dict) and bool(args) != bool(kwargs):
                return args, kwargs
        except (ValueError, TypeError, LookupError, RecursionError):
            pass
        raise PlanError(
            f"the form of a signature is that of a call, found {self.form[:60]!r}; make the plan anew"
        )


def form_of(arguments: Any) -> str:
    """The form of (args, kwargs) with an ``ArgumentPlace`` for every tensor."""
    return json.dumps([_encoded(part) for part in arguments])


def _encoded(item: Any) -> Any:
    if isinstance(item, ArgumentPlace):
        return {"tensor": int(item)}
    if isinstance(item, tuple):
        return {"tuple": [_encoded(one) for one in item]}
    if isinstance(item, list):
        return [_encoded(one) for one in item]
    if isinstance(item, dict):
        return {"dict": {name: _encoded(one) for name, one in item.items()}}
    return item


def _decoded(item: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(item, list):
        return [_decoded(one, tensors) for one in item]
    if not isinstance(item, dict):
        return item
    ((kind, held),) = item.items()
    if kind == "tensor" and type(held) is int and held >= 0:
        return tensors[held]
    if kind == "tuple" and isinstance(held, list):
        return tuple(_decoded(one, tensors) for one in held)
    if kind == "dict" and isinstance(held, dict):
        return {name: _decoded(one, tensors) for name, one in held.items()}
    raise ValueError(kind)
