"""Has a person changed what was traced? Held against the model ahead of every step.

A trace bakes in what forward reads of its modules: numbers, lists, objects, which module is called. A model
whose ``drop_prob`` a callback sets then goes on as it was. Layers that run as they are read their own
attributes anew; of them only the tensors must stay who they are. A rank may drop the layers of others, so
nothing of the model is held here but plain values; a module that is gone has nothing to say."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from ...compression.errors import PlanError
from .aliases import in_memory_of
from .contents import Facts, Same, change, contents
from .proof import HOOKS, POOL_MODULES, RELU_MODULES, is_itself
from .reach import INTERNAL, OF_EVERY, REGISTERED, data_of, is_plain, written_kinds

REMEDY = "set it back, or make the Pipeline anew and load its state_dict()"
APART = OF_EVERY | INTERNAL
GONE = type("Gone", (), {"__repr__": lambda self: "absent"})()
_EVERY = list(vars(nn.Module()))
_REGISTERED, _HOOKS = operator.itemgetter(*REGISTERED), operator.itemgetter(*HOOKS)

Read = Callable[[str, str], bool]


class Watch:
    """``check`` refuses a model that has changed since this was made.

    Args:    layers: paths of the modules that run as they are.
             read: (path of a module, name of an attribute) -> whether the trace read it; what it did not read
             may change."""

    def __init__(self, model: nn.Module, layers: Collection[str], read: Read) -> None:
        follows = in_memory_of(model)  # they change with every update
        called = {id(module) for path in layers for module in model.get_submodule(path).modules()}
        self.modules = [
            Watched(path, module, called=id(module) in called, follows=follows, read=read)
            for path, module in model.named_modules()
        ]
        kinds = {k: 0 for m in model.modules() if id(m) not in called for k in written_kinds(m)}
        self.classes = [_Class(kind, follows=follows) for kind in kinds if data_of(kind)]
        self.deep = [watched for watched in self.modules if watched.attributes.deep]

    def alive(self) -> list[tuple[Watched, nn.Module]]:
        """The modules that the user has not dropped."""
        return [(watched, module) for watched in self.modules if (module := watched.module()) is not None]

    def check(self, mode: str = "train") -> list[tuple[Watched, nn.Module]]:
        """The modules in which something has changed that may.

        Args:    mode: "eval": the training flags are going to be set, whatever they are.
        Raises:  PlanError: which attribute has changed, and how."""
        changed = [(watched, module) for watched, module in self.alive() if watched.changed(module)]
        for watched, module in changed:
            watched.refuse(module, mode)
        known: set[int] = set()
        for watched in self.deep:
            if (module := watched.module()) is not None:
                watched.attributes.check(vars(module), known)
        for kind in self.classes:
            kind.check(known)
        return changed


class _Attributes:
    """Plain attributes by identity, which is exact while they are held here; others by their contents."""

    def __init__(self, held: Mapping[str, Any], *, path: str, follows: Collection[int], read: Read) -> None:
        self.path, self.follows, self.read = path, follows, read
        self._see(held, self._facts(held))

    def check(self, held: Mapping[str, Any], known: set[int]) -> None:
        """Hold what can change inside against what it was; ``known``: what was, in this check."""
        for name in self.deep:
            if name in held and id(held[name]) not in known:
                now = self._facts({name: held[name]})
                if now[name] == self.facts[name]:
                    known.add(id(held[name]))
                else:  # another module may hold it too, and read it
                    self._refuse(name, now)
                    self.facts |= now

    def compare(self, held: Mapping[str, Any]) -> None:
        """Some identity has changed: find out whether anything else has that was read."""
        now = self._facts(held)
        for name in self.facts | now:
            self._refuse(name, now)
        self._see(held, now)

    def _facts(self, held: Mapping[str, Any]) -> dict[str, Facts]:
        start, options = _start(self.path), {"inside": False, "unversioned": self.follows}
        parts = {name: value for name, value in held.items() if name not in APART}
        return {name: contents(value, name=f"{start}{name}", **options) for name, value in parts.items()}

    def _see(self, held: Mapping[str, Any], facts: dict[str, Facts]) -> None:
        self.facts, self.plain = facts, [value for value in held.values() if is_plain(value)]
        self.deep = [name for name in facts if not is_plain(held[name])]

    def _refuse(self, name: str, now: Mapping[str, Facts]) -> None:
        if self.read(self.path, name):
            refuse_other(self.facts.get(name, {}), now.get(name, {}))


class Watched:
    """One module; the fast answer compares identities and costs about a microsecond.

    ``called``: a layer calls it, so that its own code runs and whatever is set counts. ``proves``: a plain
    ReLU or max-pool, whose zeros may stop a gradient. ``traced``: its plain attributes in tracing."""

    def __init__(
        self, path: str, module: nn.Module, *, called: bool, follows: Collection[int], read: Read
    ) -> None:
        held = vars(module)
        self.path, self.called, self.key, self.read = path, called, id(module), read
        self.module, self.names = weakref.ref(module), frozenset(held)
        self.proves = isinstance(module, (*RELU_MODULES, *POOL_MODULES)) and is_itself(module)
        self.traced = {
            name: value
            for name, value in held.items()
            if (name == "training" or name not in APART) and is_plain(value)
        }
        self.hooks, self.registered = _hooks(module), self._registered(module)
        self.attributes = _Attributes({} if called else held, path=path, follows=follows, read=read)
        self.gone: list[object] = []  # an identity is one only while its object lives
        self.parts = [weakref.ref(part, self.gone.append) for part in _parts(module).values()]
        # What every module has stands first, and is seen by its contents, but for the training flag.
        self.start = len(_EVERY) if list(itertools.islice(held, len(_EVERY))) == _EVERY else 0
        self.see(module)

    def changed(self, module: nn.Module) -> bool:
        """Whether anything is another object than when it was seen last."""
        return bool(self.gone) or _identities(module, self.start) != self.identities

    def see(self, module: nn.Module) -> None:
        """It is fine as it is."""
        self.identities = _identities(module, self.start)
        self.plain = [value for value in vars(module).values() if is_plain(value)]

    def moved(self, module: nn.Module) -> bool:
        """Whether it is set in another way than in tracing."""
        return bool(self._differences(module)) or self._rebuilt(module)

    def refuse(self, module: nn.Module, mode: str) -> None:
        """Raise PlanError for a change that cannot be honoured."""
        where = self.path or "the model"
        for name, (old, new) in self._differences(module).items():
            honoured = name == "forward" or (mode == "eval" and name == "training")
            if not honoured and self.read(self.path, name):
                said = repr(new) if len(repr(new)) < 40 else f"another {type(new).__name__}"
                raise PlanError(
                    f"{where}.{name} was {old!r} when the model was traced, which read it once, and is "
                    f"{said} now; {REMEDY}"
                )
        if not self.called and (self.registered != self._registered(module) or self._rebuilt(module)):
            raise PlanError(
                f"the trace went through {where}, and its class, forward, hooks, children or own tensors, "
                f"which were changed after Pipeline(...), would not count; {REMEDY}"
            )
        refuse_other(self.registered, self._registered(module))
        if not self.called:
            self.attributes.compare(vars(module))
        if self.proves and not is_itself(module):
            raise PlanError(
                f"a gradient may stay behind where {where} gives zeros, as it was a plain layer when it was "
                f"traced, and now it has a hook or a forward of its own; {REMEDY}"
            )

    def _differences(self, module: nn.Module) -> dict[str, tuple[Any, Any]]:
        """The plain attributes that differ from those in tracing: (then, now) by name; new ones too."""
        held = vars(module)
        then = self.traced | {name: GONE for name in held.keys() - self.names}
        pairs = {name: (old, held.get(name, GONE)) for name, old in then.items()}
        return {name: pair for name, pair in pairs.items() if not _equal(*pair)}

    def _rebuilt(self, module: nn.Module) -> bool:
        """Whether it has other hooks than in tracing, or a forward of its own since."""
        return _hooks(module) != self.hooks or "forward" in vars(module).keys() - self.names

    def _registered(self, module: nn.Module) -> Facts:
        """Parameters, buffers and modules, each as itself; of a module that is traced through its class."""
        found: Facts = {} if self.called else {"class": (type(module),)}
        return found | {
            f"{_start(self.path)}{name}": (type(part), Same(part)) for name, part in _parts(module).items()
        }


class _Class:
    def __init__(self, kind: type, *, follows: Collection[int]) -> None:
        self.kind, self.names = kind, list(data_of(kind))
        path, held = kind.__name__, self._held()
        self.attributes = _Attributes(held, path=path, follows=follows, read=lambda *_: True)
        self.identities = list(map(id, held.values()))

    def check(self, known: set[int]) -> None:
        held = self._held()
        if list(map(id, held.values())) != self.identities:
            self.attributes.compare(held)
        self.attributes.check(held, known)

    def _held(self) -> dict[str, Any]:
        kept = vars(self.kind)
        return {name: kept.get(name) for name in self.names}


def _identities(module: nn.Module, start: int) -> list[Any]:
    """What tells that nothing was exchanged: class, attributes, what is registered, and hooks."""
    held = module.__dict__
    registered = (parts.values() for parts in _REGISTERED(held))
    parts = itertools.chain(itertools.islice(held.values(), start, None), *registered)
    return [type(module), id(module.training), *map(id, parts), *itertools.chain(*_HOOKS(held))]


def _hooks(module: nn.Module) -> list[tuple[Any, ...]]:
    return list(map(tuple, _HOOKS(vars(module))))


def _parts(module: nn.Module) -> dict[str, Any]:
    """The parameters, buffers and modules that are registered, by name."""
    pairs = (pair for parts in _REGISTERED(vars(module)) for pair in parts.items())
    return {name: part for name, part in pairs if part is not None}


def _start(path: str) -> str:
    return f"{path}." if path else ""


def _equal(old: Any, new: Any) -> bool:
    """Whether both are the same to any reader: 1, 1.0 and True are not, nor are 0.0 and -0.0."""
    return old is new or (type(old) is type(new) and is_plain(old) and repr(old) == repr(new))


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
