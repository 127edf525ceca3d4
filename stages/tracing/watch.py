"""Has a person changed what was traced? Held against the model ahead of every step.

A trace bakes in what forward reads of its modules: numbers, lists, objects, which module is called. A model
whose ``drop_prob`` a callback sets then goes on as it was. Layers that run as they are read their own
attributes anew; of them only the tensors must stay who they are. A rank may drop the layers of others, so
nothing of the model is held here but plain values; a module that is gone has nothing to say."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Collection
from typing import Any

from torch import nn

from ...compression.errors import PlanError
from .aliases import in_memory_of
from .attributes import APART, Attributes, ClassData, Read, refuse_other
from .contents import Facts, Same
from .proof import HOOKS, functions_of_proofs, is_itself, may_prove
from .reach import REGISTERED, is_plain, written_kinds

REMEDY = "set it back, or make the Pipeline anew and load its state_dict()"
GONE = type("Gone", (), {"__repr__": lambda self: "absent"})()
_EVERY = list(vars(nn.Module()))
_REGISTERED, _HOOKS = operator.itemgetter(*REGISTERED), operator.itemgetter(*HOOKS)

Code = list[tuple[Any, Any]]


class Watch:
    """``check`` refuses a model that has changed since this was made.

    Args:    layers: paths of the modules that run as they are.
             read: (path of a module, name of an attribute) -> whether the trace read it; what it did not read
             may change."""

    def __init__(self, model: nn.Module, layers: Collection[str], read: Read) -> None:
        follows = in_memory_of(model)  # they change with every update
        called = {id(module) for path in layers for module in model.get_submodule(path).modules()}
        apart = {id(module) for module in model.modules()}
        self.modules = [
            Watched(path, module, called=id(module) in called, apart=apart, follows=follows, read=read)
            for path, module in model.named_modules()
        ]
        paths: dict[type, list[str]] = {}
        for path, module in model.named_modules():
            for kind in written_kinds(module):
                paths.setdefault(kind, []).append(path)
        traced = {kind for m in model.modules() if id(m) not in called for kind in written_kinds(m)}
        self.classes = [
            ClassData(kind, paths[kind], called=kind not in traced, follows=follows, read=read)
            for kind in paths
        ]
        self.deep = [watched for watched in self.modules if watched.attributes.deep]
        kinds = {type(module): None for module in model.modules() if id(module) in called}
        self.forwards, self.others = [(kind, kind.forward) for kind in kinds], set[type]()
        self.proves = any(watched.proves for watched in self.modules)
        self.functions = functions_of_proofs()

    def alive(self) -> list[tuple[Watched, nn.Module]]:
        """The modules that the user has not dropped."""
        return [(watched, module) for watched in self.modules if (module := watched.module()) is not None]

    def check(self, mode: str = "train") -> list[tuple[Watched, nn.Module]]:
        """The modules in which something has changed that may.

        Args:    mode: "eval": the training flags are going to be set, whatever they are.
        Raises:  PlanError: which attribute has changed, and how."""
        before, self.others = self.others, {kind for kind, code in self.forwards if kind.forward is not code}
        others = before | self.others  # where it was put back, it has changed as well
        changed = [
            (watched, module)
            for watched, module in self.alive()
            if watched.changed(module) or (others and type(module) in others)
        ]
        for watched, module in changed:
            watched.refuse(module, mode)
        if self.proves and functions_of_proofs() != self.functions:
            raise PlanError(
                "a gradient may stay behind where a ReLU or max-pool gives zeros, and the function of "
                f"torch.nn.functional that computes it is another since Pipeline(...); {REMEDY}"
            )
        known: set[int] = set()
        for watched in self.deep:
            if (module := watched.module()) is not None:
                watched.attributes.check(vars(module), known)
        for kind in self.classes:
            kind.check(known)
        return changed


class Watched:
    """One module; the fast answer compares identities and costs about a microsecond.

    ``called``: a layer calls it, so that its own code runs and whatever is set counts, but for what was read
    from outside. ``proves``: a plain ReLU or max-pool, whose zeros may stop a gradient. ``traced``: its plain
    attributes in tracing, ``code``: what says what it does."""

    def __init__(
        self,
        path: str,
        module: nn.Module,
        *,
        called: bool,
        apart: Collection[int],
        follows: Collection[int],
        read: Read,
    ) -> None:
        held = vars(module)
        self.path, self.called, self.key, self.read = path, called, id(module), read
        self.module, self.names = weakref.ref(module), frozenset(held)
        self.proves = may_prove(module) and is_itself(module)
        self.traced = {
            name: value
            for name, value in held.items()
            if (name == "training" or name not in APART) and is_plain(value)
        }
        self.code, self.registered = _code(module), self._registered(module)
        self.attributes = Attributes(held, path=path, apart=apart, follows=follows, read=read)
        # What every module has stands first, and is seen by its contents, but for the training flag.
        self.start = len(_EVERY) if list(itertools.islice(held, len(_EVERY))) == _EVERY else 0
        self.see(module)

    def changed(self, module: nn.Module) -> bool:
        """Whether anything is another object than when it was seen last."""
        return bool(self.gone) or _identities(module, self.start) != self.identities

    def see(self, module: nn.Module) -> None:
        """It is fine as it is."""
        self.identities = _identities(module, self.start)
        self.attributes.see(vars(module))
        # An identity is one only while its object lives; what cannot be referred to weakly, ``code`` holds.
        self.gone: list[object] = []
        hooks = [hook for kind in _HOOKS(vars(module)) for hook in kind.values()]
        parts = [part for part in (*_parts(module).values(), *hooks) if type(part).__weakrefoffset__]
        self.parts = [weakref.ref(part, self.gone.append) for part in parts]

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
        self.attributes.compare(vars(module))
        if self.proves and self._rebuilt(module):
            raise PlanError(
                f"a gradient may stay behind where {where} gives zeros, as it was a plain layer when it was "
                f"traced, and now it has another class, a hook or a forward of its own; {REMEDY}"
            )

    def _differences(self, module: nn.Module) -> dict[str, tuple[Any, Any]]:
        """The plain attributes that differ from those in tracing: (then, now) by name; new ones too."""
        held = vars(module)
        then = self.traced | {name: GONE for name in held.keys() - self.names}
        pairs = {name: (old, held.get(name, GONE)) for name, old in then.items()}
        return {name: pair for name, pair in pairs.items() if not _equal(*pair)}

    def _rebuilt(self, module: nn.Module) -> bool:
        """Whether it has another class, forward or other hooks than in tracing."""
        return _code(module) != self.code or "forward" in vars(module).keys() - self.names

    def _registered(self, module: nn.Module) -> Facts:
        """Parameters, buffers and modules, each as itself; of a module that is traced through its class."""
        found: Facts = {} if self.called else {"class": (type(module),)}
        return found | {
            f"{_start(self.path)}{name}": (type(part), Same(part)) for name, part in _parts(module).items()
        }


def _identities(module: nn.Module, start: int) -> list[Any]:
    """What tells that nothing was exchanged: class, attributes, what is registered, and hooks."""
    held = module.__dict__
    registered = (parts.values() for parts in _REGISTERED(held))
    parts = itertools.chain(itertools.islice(held.values(), start, None), *registered)
    found: list[Any] = [type(module), id(module.training), *map(id, parts)]
    for hooks in _HOOKS(held):
        if hooks:
            found += [*hooks, *map(id, hooks.values())]
    return found


def _code(module: nn.Module) -> Code:
    """What says what it does: its class and the forward of that, and its hooks in their order."""
    hooks = [item for kind in _HOOKS(vars(module)) for item in kind.items()]
    return [(type(module), type(module).forward), *((handle, Same(hook)) for handle, hook in hooks)]


def _parts(module: nn.Module) -> dict[str, Any]:
    """The parameters, buffers and modules that are registered, by name."""
    pairs = (pair for parts in _REGISTERED(vars(module)) for pair in parts.items())
    return {name: part for name, part in pairs if part is not None}


def _start(path: str) -> str:
    return f"{path}." if path else ""


def _equal(old: Any, new: Any) -> bool:
    """Whether both are the same to any reader: 1, 1.0 and True are not, nor are 0.0 and -0.0."""
    return old is new or (type(old) is type(new) and is_plain(old) and repr(old) == repr(new))
