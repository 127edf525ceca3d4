"""Numbers that follow the size of the micro-batch, and the containers that hold them in a call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Affine:
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
        whole = isinstance(item, torch.Size) and all(isinstance(part, int) for part in parts)
        return torch.Size(parts) if whole else tuple(parts)
    if isinstance(item, list):
        return [mapped(one, kinds, change) for one in item]
    if isinstance(item, Mapping):
        return {key: mapped(one, kinds, change) for key, one in item.items()}
    if isinstance(item, slice):
        return slice(*(mapped(one, kinds, change) for one in (item.start, item.stop, item.step)))
    return item


@dataclasses.dataclass(frozen=True, slots=True)
class Opens:
    """A container among ``flat`` parts: two with equal ``kind`` and ``keys`` have their parts in the same
    places."""

    kind: type
    keys: tuple[Any, ...]
    whole: Any = dataclasses.field(compare=False)

    def __repr__(self) -> str:
        return repr(self.whole)


def flat(item: Any) -> Iterator[Any]:
    """The parts of an argument in their order, each container ahead of what it holds."""
    if isinstance(item, slice):
        yield from (Opens(slice, (), item), item.start, item.stop, item.step)
    elif isinstance(item, tuple | list | Mapping):
        named = isinstance(item, Mapping)
        kind = dict if named else list if isinstance(item, list) else type(item)
        yield Opens(kind, tuple(item) if named else (len(item),), item)
        for part in item.values() if named else item:
            yield from flat(part)
    else:
        yield item
