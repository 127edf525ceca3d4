"""Numbers that follow the size of the micro-batch, and the containers that hold them in a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch


class Affine(NamedTuple):
    """``slope`` x (samples of the micro-batch) + ``offset``."""

    slope: int
    offset: int

    def at(self, samples: int) -> int:
        """The number for this many samples."""
        return self.slope * samples + self.offset


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """What a number was at the sizes that were recorded."""

    values: dict[int, int]

    def at(self, samples: int) -> int:
        """The number for this many samples; KeyError where none was recorded."""
        return self.values[samples]


def affine_of(values: Mapping[int, int]) -> int | Affine | None:
    """The rule that gives ``values`` by number of samples (two or more): a number where they are all one,
    None where there is no rule."""
    (a, first), (b, second) = list(values.items())[:2]
    slope, rest = divmod(second - first, b - a)
    rule = Affine(slope, first - slope * a)
    if rest or any(rule.at(size) != value for size, value in values.items()):
        return None
    return rule if slope else first


def at_size(item: Any, samples: int) -> Any:
    """``item`` with the numbers of a micro-batch of so many samples."""
    return mapped(item, (Affine, Table), lambda rule: rule.at(samples))


def mapped(item: Any, kinds: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """An argument with ``change`` of everything of ``kinds`` in it, in containers of its own: what is called
    with them may change them."""
    if isinstance(item, kinds):
        return change(item)
    if isinstance(item, tuple):
        parts = [mapped(one, kinds, change) for one in item]
        if hasattr(item, "_fields"):
            return type(item)(*parts)
        return type(item)(parts) if isinstance(item, torch.Size) else tuple(parts)
    if isinstance(item, list):
        return [mapped(one, kinds, change) for one in item]
    if isinstance(item, Mapping):
        return {key: mapped(one, kinds, change) for key, one in item.items()}
    if isinstance(item, slice):
        return slice(*(mapped(one, kinds, change) for one in (item.start, item.stop, item.step)))
    return item


def has_table(facts: Any) -> bool:
    """Whether a number among the facts of a node follows no rule."""
    if isinstance(facts, slice):
        return has_table((facts.start, facts.stop, facts.step))
    if isinstance(facts, Mapping):
        return has_table(list(facts.values()))
    if isinstance(facts, tuple | list):
        return any(has_table(one) for one in facts)
    return isinstance(facts, Table)
