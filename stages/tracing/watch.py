"""Has a person changed what was traced? Held against the model ahead of every step.

A trace bakes in what forward reads of its modules: numbers, lists, objects, which module is called. A model
whose ``drop_prob`` a callback sets then goes on as it was. Layers that run as they are read their own
attributes anew; of them only the tensors must stay who they are. A rank may drop the layers of others, so
nothing of the model is held here but plain values."""

from __future__ import annotations

import itertools
import operator
import re
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from ...compression.errors import PlanError
from .aliases import in_memory_of
from .contents import Facts, Same, change, contents
from .proof import HOOKS
from .reach import INTERNAL, REGISTERED, data_of, is_plain, written_kinds

OF_EVERY = list(vars(nn.Module()))  # attributes of every module; training flags are those of the moment
APART = {*INTERNAL, *OF_EVERY}
CALLED = -1
_OF_EVERY = operator.itemgetter(*REGISTERED, *HOOKS)


Read = Callable[[str, str], bool]


def _any(path: str, name: str) -> bool:
    """Every attribute was read."""
    return True


class Watch:
    """``check`` refuses a model that has changed since this was made.

    Args:    layers: paths of the modules that run as they are.
             read: (path of a module, name of an attribute) -> whether the trace read it; what it did not read
             may change."""

    def __init__(self, model: nn.Module, layers: Collection[str], read: Read = _any) -> None:
        follows = in_memory_of(model)  # they change with every update
        self.modules: list[_Module] = []
        kinds: dict[type, None] = {}
        for path, module in model.named_modules():
            called = any(path == layer or path.startswith(f"{layer}.") for layer in layers)
            kinds |= {} if called else dict.fromkeys(written_kinds(module))
            if not called or any(vars(module)[name] for name in REGISTERED):
                self.modules.append(_Module(module, path=path, called=called, follows=follows, read=read))
        self.classes = [_Class(kind, follows=follows) for kind in kinds if data_of(kind)]
        self.deep = [watched for watched in self.modules if watched.attributes.deep]

    def check(self) -> None:
        """Raises PlanError: which attribute has changed, and how."""
        for watched in self.modules:
            module = watched.module()
            if module is not None and (
                _identities(module.__dict__, watched.start) != watched.identities or watched.gone
            ):
                watched.compare(module)
        known: set[int] = set()
        for watched in self.deep:
            module = watched.module()
            if module is not None:
                watched.attributes.check(vars(module), known)
        for kind in self.classes:
            kind.check(known)


def _identities(held: dict[str, Any], start: int) -> list[int]:
    """The ids of what a module holds: attributes from number ``start`` on, what is registered, and hooks."""
    parameters, buffers, modules, *hooks = _OF_EVERY(held)
    registered = parameters.values(), buffers.values(), modules.values()
    if start == CALLED:
        return list(map(id, itertools.chain(*registered)))
    return list(map(id, itertools.chain(itertools.islice(held.values(), start, None), *registered, *hooks)))


class _Attributes:
    """Plain attributes by identity, which is exact while they are held here; others by their contents."""

    def __init__(
        self, held: Mapping[str, Any], *, path: str, follows: Collection[int], read: Read = _any
    ) -> None:
        self.path, self.follows, self.read = path, follows, read
        self._take(held, self.facts_of(held))

    def facts_of(self, held: Mapping[str, Any]) -> Facts:
        found: Facts = {}
        for name, value in held.items():
            if name not in APART:
                path = f"{self.path}.{name}" if self.path else name
                found |= contents(value, name=path, inside=False, unversioned=self.follows)
        return found

    def check(self, held: Mapping[str, Any], known: set[int]) -> None:
        """Hold what can change inside against what it was; ``known``: what was, in this check."""
        for name, facts in self.deep.items():
            if name in held and id(held[name]) not in known:
                now = self.facts_of({name: held[name]})
                if now == facts:
                    known.add(id(held[name]))
                else:  # another module may hold it too, and read it
                    self.deep[name] = self._held_against(facts, now)

    def compare(self, held: Mapping[str, Any]) -> None:
        """Some identity has changed: find out whether anything else has that was read."""
        now = self._held_against(self.facts, self.facts_of(held))
        self._take(held, now)

    def _take(self, held: Mapping[str, Any], facts: Facts) -> None:
        self.plain = [value for value in held.values() if is_plain(value)]
        self.facts = facts
        self.deep = {
            name: self.facts_of({name: value})
            for name, value in held.items()
            if name not in APART and not is_plain(value)
        }

    def _held_against(self, before: Facts, now: Facts) -> Facts:
        """``now``, unless something that was read is not as ``before``."""
        if before != now:
            refuse_other(self._read(before), self._read(now))
        return now

    def _read(self, facts: Facts) -> Facts:
        start = len(self.path) + 1 if self.path else 0
        return {path: fact for path, fact in facts.items() if self.read(self.path, _attribute(path[start:]))}


def _attribute(path: str) -> str:
    """The attribute that a path of its contents begins with."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


class _Module:
    def __init__(
        self, module: nn.Module, *, path: str, called: bool, follows: Collection[int], read: Read
    ) -> None:
        self.module, self.called, self.path = weakref.ref(module), called, path
        self.attributes = _Attributes({} if called else vars(module), path=path, follows=follows, read=read)
        self.registered = self._registered(module)
        self.gone: list[object] = []  # an identity is one only while its object lives
        parts = [part for name in REGISTERED for part in vars(module)[name].values() if part is not None]
        self.parts = [weakref.ref(part, self.gone.append) for part in parts]
        first = list(itertools.islice(vars(module), len(OF_EVERY)))
        self.start = CALLED if called else len(first) if first == OF_EVERY else 0
        self.identities = _identities(vars(module), self.start)

    def compare(self, module: nn.Module) -> None:
        """Some identity has changed: find out whether anything else has."""
        refuse_other(self.registered, self._registered(module))
        if not self.called:
            self.attributes.compare(vars(module))
        self.identities = _identities(vars(module), self.start)

    def _registered(self, module: nn.Module) -> Facts:
        """Parameters, buffers and modules, each as itself, and who is called before and after it."""
        held, start = vars(module), f"{self.path}." if self.path else ""
        found: Facts = {}
        for name, part in (pair for kind in REGISTERED for pair in held[kind].items()):
            found[f"{start}{name}"] = type(part), Same(part)
        if not self.called:
            found |= {f"{start}{name}": (dict, len(held[name]), tuple(held[name])) for name in HOOKS}
        return found


class _Class:
    def __init__(self, kind: type, *, follows: Collection[int]) -> None:
        self.kind, self.names = kind, list(data_of(kind))
        self.attributes = _Attributes(self._held(), path=kind.__name__, follows=follows)
        self.identities = list(map(id, self._held().values()))

    def check(self, known: set[int]) -> None:
        held = self._held()
        if list(map(id, held.values())) != self.identities:
            self.attributes.compare(held)
        self.attributes.check(held, known)

    def _held(self) -> dict[str, Any]:
        kept = vars(self.kind)
        return {name: kept.get(name) for name in self.names}


def refuse_other(before: Facts, after: Facts) -> None:
    """Raise PlanError unless nothing has changed."""
    if before == after:
        return
    for path in before | after:
        was, now = before.get(path), after.get(path)
        if was != now:
            raise PlanError(
                f"a pipeline runs what was traced, and {path} has changed since ({change(was, now)}); set it "
                "back, or make a new Pipeline"
            )
