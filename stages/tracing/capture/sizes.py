"""Numbers in a recorded graph that follow the size of the micro-batch.

Eager code reads a shape into Python and goes on with a number, so a recording holds the numbers of one size.
Recordings at other sizes tell which of them move, and how: those that are affine in the number of samples are
written as such; any other is a table of the sizes that were recorded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx

from .affine import Affine, Table, affine_of


class Different(Exception):
    """Two recordings do not differ in their sizes alone; ``node`` is the first of the one that shows it."""

    def __init__(self, node: fx.Node, other: fx.Node | None, what: str) -> None:
        super().__init__(what)
        self.node, self.other, self.what = node, other, what


def moving(graph: fx.Graph, others: Mapping[int, fx.Graph], samples: int) -> dict[fx.Node, Any]:
    """For every node of ``graph`` whose numbers move: its (args, kwargs, expect, shape) with ``Affine`` or
    ``Table`` in them.

    Args:    samples: the size of micro-batch that ``graph`` was recorded at; ``others``: recordings by size.
    Raises:  Different: they are not the same nodes.
    """
    found: dict[fx.Node, Any] = {}
    twins = {size: pairs_of(graph, other) for size, other in others.items()}
    for node in graph.nodes:
        merge = _Merge(node, samples, twins)
        facts = merge.of(facts_of(node), {size: facts_of(pairs[node]) for size, pairs in twins.items()})
        if merge.moves:
            found[node] = facts
    return found


def refuse_data(graph: fx.Graph, other: fx.Graph, samples: int) -> None:
    """Raise Different unless two recordings of one size, on other data, are the same."""
    for node, its in pairs_of(graph, other).items():
        if node.meta.get("sizes") != its.meta.get("sizes"):
            raise Different(node, its, f"the shape of {node.name} depends on the data")
    moving(graph, {samples: other}, samples)


def pairs_of(graph: fx.Graph, other: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The nodes of two recordings of one model beside each other."""
    pairs: dict[fx.Node, fx.Node] = {}
    for node, its in zip(graph.nodes, other.nodes, strict=False):
        if (node.op, node.name) != (its.op, its.name) or _called(node) != _called(its):
            raise Different(node, its, f"the run goes on with {its.name} in the place of {node.name}")
        pairs[node] = its
    if len(graph.nodes) != len(other.nodes):
        last = next(reversed(pairs))
        raise Different(last, pairs[last], f"the run ends behind {last.name}, or does not")
    return pairs


def same_way(
    nodes: Iterable[fx.Node], recording: fx.Graph, samples: int, facts: Mapping[fx.Node, Any] | None = None
) -> None:
    """Hold a recording with ``samples`` against ``nodes``, and write its numbers into their tables.

    Args:    facts: those of a node, where they do not stand in it yet.
    Raises:  Different: the recording goes another way, or has a number that the rule of its place does not
    give."""
    twins = {node.name: node for node in recording.nodes}
    ours = [node for node in nodes if node.op != "get_attr"]
    theirs = [node for node in recording.nodes if node.op not in ("get_attr", "output")]
    for node in ours:
        its = twins.get(node.name)
        if its is None or _called(node) != _called(its):
            raise Different(node, its, f"the run has no {node.name} with {samples} samples")
        rule = (facts or {}).get(node) or facts_of(node)
        _fill(rule, facts_of(its), samples)
        if not _agree(rule, facts_of(its), samples):
            raise Different(node, its, f"{node.name} is another call with {samples} samples")
    if len(ours) != len(theirs):
        known = {node.name for node in ours}
        extra = next((node for node in theirs if node.name not in known), theirs[-1])
        raise Different(extra, None, f"the run goes on to {extra.name} with {samples} samples")


def _agree(rule: Any, found: Any, samples: int) -> bool:
    """Whether the facts of a run are what the rule gives."""
    if isinstance(rule, fx.Node):
        return isinstance(found, fx.Node) or "told" in rule.meta
    if isinstance(rule, Affine | Table):
        return type(found) is int and rule.at(samples) == found
    if isinstance(rule, slice) and isinstance(found, slice):
        return _agree((rule.start, rule.stop, rule.step), (found.start, found.stop, found.step), samples)
    if isinstance(rule, tuple | list) and isinstance(found, tuple | list):
        return len(rule) == len(found) and all(
            _agree(a, b, samples) for a, b in zip(rule, found, strict=True)
        )
    if isinstance(rule, Mapping) and isinstance(found, Mapping):
        return rule.keys() == found.keys() and all(_agree(rule[key], found[key], samples) for key in rule)
    if not isinstance(rule, bool | int | float | complex | str | type(None)):
        return type(rule) is type(found)
    return type(rule) is type(found) and repr(rule) == repr(found)


def _fill(ours: Any, theirs: Any, samples: int) -> None:
    if isinstance(ours, Affine):
        return
    if isinstance(ours, Table):
        ours.values[samples] = theirs
    elif isinstance(ours, slice) and isinstance(theirs, slice):
        for name in ("start", "stop", "step"):
            _fill(getattr(ours, name), getattr(theirs, name), samples)
    elif isinstance(ours, tuple | list) and isinstance(theirs, tuple | list):
        for a, b in zip(ours, theirs, strict=False):  # another length is another call
            _fill(a, b, samples)
    elif isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in ours.keys() & theirs.keys():
            _fill(ours[key], theirs[key], samples)


def facts_of(node: fx.Node) -> tuple[Any, ...]:
    """What a node does with its numbers: args, kwargs, and what it checks."""
    return node.args, node.kwargs, node.meta.get("expect"), node.meta.get("shape")


def _called(node: fx.Node) -> Any:
    return called(node.target)


def called(target: Any) -> Any:
    """What a node calls, as far as two runs share it: a function made anew in each (a partial) counts by
    name."""
    return target if isinstance(target, str) else getattr(target, "__qualname__", type(target).__qualname__)


class _Merge:
    """Lays the facts of a node over those of its twins, by their sizes."""

    def __init__(self, node: fx.Node, samples: int, twins: Mapping[int, Mapping[fx.Node, fx.Node]]) -> None:
        self.node, self.samples, self.twins = node, samples, twins
        self.moves = False

    def of(self, ours: Any, theirs: Mapping[int, Any]) -> Any:
        """``ours`` with what moves in the place of its numbers."""
        if isinstance(ours, fx.Node):
            for size, its in theirs.items():
                handed = "told" in ours.meta and not isinstance(its, fx.Node)  # a number, whatever it is now
                if self.twins[size].get(ours) is not its and not handed:
                    raise self._different(ours, its)
            return ours
        if any(type(its) is not type(ours) for its in theirs.values()):
            raise self._different(ours, next(iter(theirs.values())))
        if isinstance(ours, slice):
            names = ("start", "stop", "step")
            return slice(*(self.of(getattr(ours, n), _each(theirs, getattr, n)) for n in names))
        if isinstance(ours, tuple | list):
            return self._sequence(ours, theirs)
        if isinstance(ours, Mapping):
            if any(list(its) != list(ours) for its in theirs.values()):
                raise self._different(ours, next(iter(theirs.values())))
            return {key: self.of(ours[key], _each(theirs, operator.getitem, key)) for key in ours}
        return self._leaf(ours, theirs)

    def _sequence(self, ours: Any, theirs: Mapping[int, Any]) -> Any:
        if any(len(its) != len(ours) for its in theirs.values()):
            raise self._different(ours, next(iter(theirs.values())))
        items = [self.of(item, _each(theirs, operator.getitem, i)) for i, item in enumerate(ours)]
        if all(a is b for a, b in zip(items, ours, strict=True)):
            return ours
        return type(ours)(*items) if hasattr(ours, "_fields") else tuple(items)

    def _leaf(self, ours: Any, theirs: Mapping[int, Any]) -> Any:
        other = [its for its in theirs.values() if not _alike(ours, its)]
        if not other or not isinstance(ours, bool | int | float | complex | str | bytes):
            return ours  # a function made anew in each run is the same by its name
        if type(ours) is not int or list(theirs) == [self.samples]:
            raise self._different(ours, other[0])
        self.moves = True
        values = {self.samples: ours, **theirs}
        rule = affine_of(values)
        return Table(values) if rule is None else rule

    def _different(self, ours: Any, its: Any) -> Different:
        what = f"{self.node.name} has {_short(ours)} once and {_short(its)} then"
        return Different(self.node, self.twins[next(iter(self.twins))].get(self.node), what)


def _alike(ours: Any, its: Any) -> bool:
    """Whether two leaves are equal; NaN is equal to itself, and arrays are as long as all of them is."""
    if its is ours:
        return True
    try:
        return bool(its == ours) or bool(its != its and ours != ours)
    except (ValueError, TypeError, RuntimeError):
        return repr(ours) == repr(its)


def _each(items: Mapping[int, Any], get: Callable[[Any, Any], Any], key: Any) -> dict[int, Any]:
    return {size: get(item, key) for size, item in items.items()}


def _short(item: Any) -> str:
    text = repr(item)
    return text if len(text) < 60 else f"{text[:57]}..."
