"""Numbers that a layer returns: carried where Python hands them on as they are, held to what they were where
it went on with them.

A function under ``torch.fx.wrap``, or in ``leaves=``, may return another number next time. Python gets it as
a number that notes what is done with it: compared, added to, asked for its truth. Who was only handed it is
seen by recording the run again with other numbers in its place: whatever changes with them, and only as they
do, is the number itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_map

from .dynamic_shapes import Different, flat, mapped, pairs_of

NUMBERS = (bool, int, float)


class Altering:
    """Gives each number of a run another value; ``way`` 0 and 1 give two different ones, None one that notes
    in ``used`` that Python went on from it."""

    def __init__(self, way: int | None) -> None:
        self.way, self.count = way, 0
        self.used = False

    def __call__(self, number: Any) -> Any:
        """The number that Python gets to see."""
        self.count += 1
        if self.way is None:
            return number if isinstance(number, bool) else _NOTING[type(number)](number, self)
        if isinstance(number, bool):
            return not number
        if isinstance(number, int):
            return number + (1009, -2003)[self.way] * self.count
        return number + (0.37, -1.61)[self.way] * self.count


def _noting(kind: type) -> Any:
    """A kind of number that notes every operation of Python on it; torch takes it as the number."""

    def new(cls: Any, number: Any, noted: Altering) -> Any:
        made = kind.__new__(cls, number)
        made.noted = noted
        return made

    def operation(name: str) -> Any:
        plain = getattr(kind, name)

        def run(self: Any, *args: Any) -> Any:
            if not any(isinstance(item, torch.Tensor) for item in args):  # those calls are recorded
                self.noted.used = True
            return plain(self, *args)

        return run

    names = [name for name in dir(kind) if name.startswith("__") and name not in _NOT_OPERATIONS]
    return type(f"Noting{kind.__name__}", (kind,), {"__new__": new, **{n: operation(n) for n in names}})


_NOT_OPERATIONS = frozenset(
    "__new__ __init__ __class__ __getattribute__ __setattr__ __delattr__ __doc__ __dir__ __init_subclass__ "
    "__subclasshook__ __reduce__ __reduce_ex__ __getnewargs__ __getstate__ __sizeof__ __getformat__".split()
)
_NOTING = {kind: _noting(kind) for kind in (int, float)}
_NOTED = {noting: kind for kind, noting in _NOTING.items()}


def plain_number(item: Any) -> Any:
    """The number behind one that notes; anything else as it is."""
    kind = _NOTED.get(type(item))
    return item if kind is None else kind.__pos__(item)


def plain_numbers(given: Any) -> Any:
    """Arguments with plain numbers, for code that is no part of the run."""
    return tree_map(plain_number, given)


class _Row(NamedTuple):
    node: fx.Node
    seen: tuple[Any, ...]


def carry(graph: fx.Graph, others: Sequence[fx.Graph]) -> None:
    """Write the node that told a number in the place of the number, wherever it was handed on.

    Args:    others: recordings of the same run in which every number was ``Altering``.
    Raises:  Different: something else changed with them, or it cannot be told which number it was.
    """
    twins = [pairs_of(graph, other) for other in others]
    rows = [
        _Row(node, tuple(n.meta["told"] for n in (node, *(pairs[node] for pairs in twins))))
        for node in graph.nodes
        if "told" in node.meta
    ]
    for row in rows:
        alike = [other for other in rows if _same(row.seen, other.seen)]
        if len(alike) > 1 or any(_same((row.seen[0],), (now,)) for now in row.seen[1:]):
            raise Different(row.node, None, f"{row.node.name} tells a number that cannot be followed")
    handed = {}
    for node in graph.nodes:
        facts, *altered = ((one.args, one.kwargs) for one in (node, *(pairs[node] for pairs in twins)))
        seen = zip(flat(facts), *map(flat, altered), strict=False)
        numbers = iter([_handed(node, rows, row) for row in seen if isinstance(row[0], NUMBERS)])
        handed[node] = mapped(facts, NUMBERS, lambda _, numbers=numbers: next(numbers))
    for node, (args, kwargs) in handed.items():
        node.args, node.kwargs = args, kwargs


def hold(graph: fx.Graph) -> None:
    """Make guards of the numbers: they were read, and must be the same in every run."""
    for node in graph.nodes:
        if "told" in node.meta:
            node.meta["expect"] = node.meta.pop("told")


def _same(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    return all(type(a) is type(b) and repr(a) == repr(b) for a, b in zip(ours, theirs, strict=True))


def _handed(node: fx.Node, rows: Sequence[_Row], seen: tuple[Any, ...]) -> Any:
    """The node that told a number that ``node`` is given, ``seen`` in the run and in those with other ones;
    else the number."""
    if type(seen[0]) not in NUMBERS or _same(seen[:1] * len(seen), seen):
        return seen[0]
    for row in rows:
        if _same(row.seen, seen):
            return row.node
    raise Different(node, None, f"{node.name} is given a number made of one that a layer told")


def replaced(item: Any, numbers: Mapping[tuple[Any, ...], Any], path: tuple[Any, ...] = ()) -> Any:
    """``item`` with other numbers, by the keys that lead to each."""
    if path in numbers:
        return numbers[path]
    if type(item) in (tuple, list):
        return type(item)(replaced(one, numbers, (*path, i)) for i, one in enumerate(item))
    if type(item) is dict:
        return {key: replaced(one, numbers, (*path, key)) for key, one in item.items()}
    return item


def numbers_in(item: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Keys and value of every number in nested tuples, lists and dicts."""
    if type(item) in NUMBERS:
        yield path, item
    elif type(item) in (tuple, list):
        for i, one in enumerate(item):
            yield from numbers_in(one, (*path, i))
    elif type(item) is dict:
        for key, one in item.items():
            yield from numbers_in(one, (*path, key))
