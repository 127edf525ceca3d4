"""Numbers in a recorded graph that follow the size of the micro-batch.

Eager code reads a shape into Python and goes on with a number, so a recording holds the numbers of one size.
Recordings at other sizes tell which of them move, and how: those that are affine in the number of samples
are written as such; where one follows no rule, each size is recorded when it comes."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx


@dataclasses.dataclass(frozen=True, slots=True)
class Affine:
    """``slope`` x (samples of the micro-batch) + ``offset``."""

    slope: int
    offset: int

    def at(self, samples: int) -> int:
        """The number for this many samples."""
        return self.slope * samples + self.offset


def at_size(item: Any, samples: int) -> Any:
    """Replace the rules in ``item`` by the numbers of a micro-batch of so many samples."""
    return mapped(item, Affine, lambda rule: rule.at(samples))


def mapped(item: Any, kinds: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """``item`` with ``change`` of everything of ``kinds`` in it, in containers of its own."""
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
    """A container among ``flat`` parts; equal ones have their parts in the same places."""

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


class Different(Exception):
    """Two recordings do not differ in their sizes alone; ``node`` is the first of the one that shows it."""

    def __init__(self, node: fx.Node, other: fx.Node | None, what: str) -> None:
        super().__init__(what)
        self.node, self.other, self.what = node, other, what


def moving(
    graph: fx.Graph, others: Mapping[int, fx.Graph], samples: int, *, results: bool = False
) -> dict[fx.Node, Any]:
    """For every node whose numbers move, its (args, kwargs, expect, shape) with ``Affine`` in them.

    Args:    samples: the size of micro-batch that ``graph`` was recorded at; ``others``: recordings by size;
             ``results``: the shape of every result follows a rule, too.
    Raises:  Different: they are not the same nodes, or a number follows no rule."""
    found: dict[fx.Node, Any] = {}
    twins = {size: pairs_of(graph, other) for size, other in others.items()}
    for node in graph.nodes:
        facts, numbers = facts_of(node), list(_rules(node, facts_of, samples, twins))
        if any(isinstance(number, Affine) for number in numbers):
            rest = iter(numbers)
            found[node] = mapped(facts, int, lambda _, rest=rest: next(rest))
        if results:
            list(_rules(node, shapes_of, samples, twins))
    return found


def _rules(
    node: fx.Node,
    look: Callable[[fx.Node], Any],
    samples: int,
    twins: Mapping[int, Mapping[fx.Node, fx.Node]],
) -> Iterator[Any]:
    """The rule for every integer that ``look`` finds at ``node``, held to what it finds at its twins."""
    beside = [flat(look(its[node])) for its in twins.values()]
    for ours, *theirs in zip(flat(look(node)), *beside, strict=False):
        rule = ours  # a function made anew in each run is the same by its name
        pairs = zip(theirs, twins.values(), strict=True)
        wrong = [its for its, twin in pairs if not _is_twin(ours, its, twin)]
        if not wrong and isinstance(ours, bool | int | float | complex | str | bytes):
            wrong = [its for its in theirs if not _alike(ours, its)]
            if wrong and type(ours) is int and list(twins) != [samples]:
                slope = (theirs[0] - ours) // (next(iter(twins)) - samples)
                rule = Affine(slope, ours - slope * samples)
                if [rule.at(size) for size in twins] == theirs:
                    wrong = []
        if wrong:
            what = f"{node.name} has {_short(ours)} once and {_short(wrong[0])} then"
            raise Different(node, next(iter(twins.values())).get(node), what)
        if isinstance(ours, int):
            yield rule


def _is_twin(ours: Any, its: Any, twins: Mapping[fx.Node, fx.Node]) -> bool:
    if isinstance(ours, fx.Node):
        return twins.get(ours) is its
    return type(its) is type(ours) and (not isinstance(ours, Opens) or its == ours)


def refuse_data(graph: fx.Graph, other: fx.Graph, samples: int) -> None:
    """Raise Different unless two recordings of one size, on other data, are the same."""
    for node, its in pairs_of(graph, other).items():
        if shapes_of(node) != shapes_of(its):
            raise Different(node, its, f"the shape of {node.name} depends on the data")
    moving(graph, {samples: other}, samples)


def pairs_of(graph: fx.Graph, other: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The nodes of two recordings of one model beside each other."""
    pairs: dict[fx.Node, fx.Node] = {}
    for node, its in zip(graph.nodes, other.nodes, strict=False):
        if (node.op, node.name) != (its.op, its.name) or called(node.target) != called(its.target):
            raise Different(node, its, f"the run goes on with {its.name} in the place of {node.name}")
        pairs[node] = its
    if len(graph.nodes) != len(other.nodes):
        last = next(reversed(pairs))
        raise Different(last, pairs[last], f"the run ends behind {last.name}, or does not")
    return pairs


def same_way(nodes: Iterable[fx.Node], recording: fx.Graph, samples: int, *, flags: bool = True) -> None:
    """Raise Different if a recording with ``samples`` goes another way than ``nodes``, or has a number that
    the rule of its place does not give; ``flags``: so are bools and floats."""
    twins = {node.name: node for node in recording.nodes}
    ours = [node for node in nodes if node.op != "get_attr"]
    theirs = [node for node in recording.nodes if node.op != "get_attr"]
    for node in ours:
        its = twins.get(node.name)
        if its is None or called(node.target) != called(its.target):
            raise Different(node, its, f"the run has no {node.name} with {samples} samples")
        pairs = zip(flat(facts_of(node)), flat(facts_of(its)), strict=False)
        if not all(_follows(rule, found, samples, flags=flags) for rule, found in pairs):
            raise Different(node, its, f"{node.name} is another call with {samples} samples")
    if len(ours) != len(theirs):
        known = {node.name for node in ours}
        extra = next(node for node in theirs if node.name not in known)
        raise Different(extra, None, f"the run goes on to {extra.name} with {samples} samples")


def moving_as(nodes: Sequence[fx.Node], recording: fx.Graph, samples: int) -> dict[fx.Node, Any]:
    """The result of ``moving`` for a recording that goes the way of ``nodes``, whose numbers are rules; bools
    and floats (dropout, training) are its own.

    Raises: Different: it goes another way."""
    same_way(nodes, recording, samples, flags=False)
    rules, found = {node.name: facts_of(node) for node in nodes}, dict[fx.Node, Any]()
    for node in recording.nodes:
        known = [*flat(rules.get(node.name, ()))]
        if any(isinstance(rule, Affine) for rule in known):
            pairs = zip(flat(facts_of(node)), known, strict=True)
            rest = iter([r if isinstance(r, Affine) else n for n, r in pairs if isinstance(n, int)])
            found[node] = mapped(facts_of(node), int, lambda _, rest=rest: next(rest))
    return found


def _follows(rule: Any, found: Any, samples: int, *, flags: bool) -> bool:
    if isinstance(rule, fx.Node):
        return isinstance(found, fx.Node)
    if isinstance(rule, bool | float) and not flags:
        return type(rule) is type(found)
    if isinstance(rule, Affine):
        return type(found) is int and rule.at(samples) == found
    if isinstance(rule, Opens):
        return rule == found
    plain = isinstance(rule, bool | int | float | complex | str | type(None))
    return type(rule) is type(found) and (not plain or repr(rule) == repr(found))


def facts_of(node: fx.Node) -> tuple[Any, ...]:
    """Arguments of a node, and what it checks."""
    return node.args, node.kwargs, node.meta.get("expect"), node.meta.get("shape")


def shapes_of(node: fx.Node) -> Any:
    """Shapes of the tensors in the result of a node."""
    return node.meta.get("sizes")


def called(target: Any) -> Any:
    """Return what a node calls; a function that is made in each run (a partial) counts by its name."""
    return target if isinstance(target, str) else getattr(target, "__qualname__", type(target).__qualname__)


def _alike(ours: Any, its: Any) -> bool:
    """Return whether two leaves are equal; NaN is equal to itself."""
    if its is ours:
        return True
    try:
        return bool(its == ours) or bool(its != its and ours != ours)
    except (ValueError, TypeError, RuntimeError):
        return repr(ours) == repr(its)


def _short(item: Any) -> str:
    text = repr(item)
    return text if len(text) < 60 else f"{text[:57]}..."
