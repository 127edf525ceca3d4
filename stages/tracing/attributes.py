"""What the attributes of modules and of their classes held when a trace read them, compared by contents.

Only what was read is looked at, and always against the trace: a change that was refused once is refused at
the next step too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ...compression.errors import PlanError
from .capture.reads import ALL
from .contents import Facts, change, contents
from .reach import INTERNAL, OF_EVERY, data_of, is_plain

APART = OF_EVERY | INTERNAL
Read = Callable[[str, str], bool]


def read_in(reads: Collection[tuple[str, str]]) -> Read:
    """(path, attribute) -> whether it is among what a trace read of its modules."""
    return lambda path, name: (path, name) in reads or (path, ALL) in reads


class Attributes:
    """Those of ``held`` that were read: plain ones by identity, which is exact while they are held here;
    others by their contents.

    Args:    apart: ids of modules that are watched for themselves."""

    def __init__(
        self,
        held: Mapping[str, Any],
        *,
        path: str,
        apart: Collection[int],
        follows: Collection[int],
        read: Read,
    ) -> None:
        self.path, self.apart, self.follows, self.read = path, apart, follows, read
        self.facts = self._facts(held)
        self.see(held)

    def see(self, held: Mapping[str, Any]) -> None:
        """What was exchanged holds the same, or was not read."""
        self.plain = [value for value in held.values() if is_plain(value)]
        self.deep = [name for name, value in held.items() if self._counts(name) and not is_plain(value)]

    def check(self, held: Mapping[str, Any], known: set[int]) -> None:
        """Hold what can change inside against what it was; ``known``: what was, in this check.

        Raises:  PlanError: something else is there."""
        for name in self.deep:
            if name in held and id(held[name]) not in known:
                now = self._facts({name: held[name]})
                refuse_other(self.facts.get(name, {}), now[name])
                known.add(id(held[name]))

    def compare(self, held: Mapping[str, Any]) -> None:
        """Some identity has changed: refuse unless all that was read holds what it held."""
        now = self._facts(held)
        for name in self.facts | now:
            refuse_other(self.facts.get(name, {}), now.get(name, {}))
        self.see(held)

    def _counts(self, name: str) -> bool:
        return name not in APART and self.read(self.path, name)

    def _facts(self, held: Mapping[str, Any]) -> dict[str, Facts]:
        start = f"{self.path}." if self.path else ""
        return {
            name: contents(
                value,
                name=f"{start}{name}",
                enters=lambda item: id(item) not in self.apart,
                unversioned=self.follows,
            )
            for name, value in held.items()
            if self._counts(name)
        }


class ClassData:
    """The data of a class of modules; ``paths``: of its modules, ``called``: whether layers call all these,
    so that only what was read of them from outside counts."""

    def __init__(
        self, kind: type, paths: Sequence[str], *, called: bool, follows: Collection[int], read: Read
    ) -> None:
        self.kind, self.called = kind, called
        self.read = lambda name: any(read(path, name) for path in paths)
        self.names = [name for name in data_of(kind) if not called or self.read(name)]
        self.known, self.size = frozenset(vars(kind)), len(vars(kind))
        held = self._held()
        self.attributes = Attributes(
            held, path=kind.__name__, apart=(), follows=follows, read=lambda *_: True
        )
        self.identities = list(map(id, held.values()))

    def check(self, known: set[int]) -> None:
        """Raise PlanError for another value, or for a name that now stands before one of a base."""
        if len(self.kind.__dict__) != self.size:
            self._refuse_new()
        if self.names:
            held = self._held()
            if list(map(id, held.values())) != self.identities:
                self.attributes.compare(held)
            self.attributes.check(held, known)

    def _refuse_new(self) -> None:
        for name in vars(self.kind).keys() - self.known:
            bases = () if self.called else self.kind.__mro__[1:]
            if not name.startswith("__") and (self.read(name) or any(name in data_of(b) for b in bases)):
                refuse_other({}, contents(vars(self.kind)[name], name=f"{self.kind.__name__}.{name}"))
        self.size = len(vars(self.kind))

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
