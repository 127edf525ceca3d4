"""Has a person changed what was traced? Held against the model ahead of every step.

A trace runs the forward of a container once and bakes in what it reads there: numbers, lists, objects, which
module is called; hooks, children and a forward that come later are not in it. Layers run as they are and
read their own attributes anew, so what is set on those counts at once; of them only the tensors must stay
who they are. A changed flag (``model.layer1.eval()`` freezes the statistics of a block) is honoured where no
container's forward read it, and refused elsewhere.

Only what was read is looked at, and always against the trace: a change that was refused once is refused at
the next step too. A rank may drop the layers of others, so nothing of the model is held here but plain
values; a module that is gone has nothing to say.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...compression.errors import PlanError
from .aliases import in_memory_of
from .capture.reads import ALL, ASKS
from .dataflow import HOOKS, functions_of_proofs, hooks_on_all_modules, is_itself, may_prove
from .layers import Traced, parts_of
from .object_snapshot import (
    INTERNAL,
    OF_EVERY,
    REGISTERED,
    Facts,
    Same,
    change,
    contents,
    data_of,
    is_plain,
    written_kinds,
)
from .unsupported import refuse_autocast

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


class Flags:
    """Watches the modules of ``model``; those that the user drops are watched no longer.

    Args:    traces: the trace of each mode, "train" and "eval".
             roots: for each a copy of the model, set as it was when it was traced, on the meta device.
             stage_of: the stage of every layer of the train trace."""

    def __init__(
        self,
        model: nn.Module,
        *,
        traces: Mapping[str, Traced],
        roots: Mapping[str, nn.Module],
        stage_of: Sequence[int],
    ) -> None:
        self.layers_of: dict[int, set[str]] = {}
        calls = [
            (mode, layer)
            for mode in traces
            for layer in traces[mode].layers
            if layer.node.op == "call_module"
        ]
        for layer in (layer for mode, layer in calls if mode == "train"):
            for module in model.get_submodule(str(layer.node.target)).modules():
                self.layers_of.setdefault(id(module), set()).add(layer.name)
        evaluation = {read for read in traces["eval"].reads if read[1] != "training"}
        reads = traces["train"].reads | evaluation
        paths = {str(layer.node.target) for _, layer in calls}
        self.watch = Watch(model, paths, read=read_in(reads))
        self.asleep = [module.training for module in roots["eval"].modules()]
        self.everywhere, self.dtype = hooks_on_all_modules(), torch.get_default_dtype()
        self.trained = {
            name: (weakref.ref(parameter), parameter.requires_grad)
            for name, parameter in model.named_parameters()
            if ("", ASKS) in reads or (name, ASKS) in reads
        }
        self.states, self.frozen = _on_several(model, traces["train"], stage_of)
        self.moved: frozenset[str] = frozenset()
        read = (*traces["train"].outside, *traces["eval"].outside)
        self.outside = [*{(one.name, one.where, id(one.value)): one for one in read}.values()]

    def check(self, mode: str) -> None:
        """Refuse what has changed since the trace and cannot be honoured; note in ``moved`` the names of the
        layers whose modules are set in another way than then.

        Args:    mode: "train" for a step; "eval": the training flags are going to be ``evaluating``.
        Raises:  PlanError: what was changed is part of the trace, or a cut relies on it."""
        refuse_autocast()
        if (now := torch.get_default_dtype()) != self.dtype:
            raise PlanError(
                f"the default dtype was {self.dtype} when the model was traced, and forward may make tensors "
                f"of it; it is {now} now: torch.set_default_dtype({self.dtype}), or make the Pipeline anew"
            )
        if changed := self.watch.check(mode):
            seen = changed if mode == "train" else []
            for watched, module in seen:
                if (
                    watched.key in self.states
                    and module.training
                    and not watched.traced.get("training", True)
                ):
                    raise PlanError(
                        f"{watched.path or 'the model'} was in eval mode when the model was cut; in train "
                        f"mode it writes to a buffer that several stages use; {REMEDY}"
                    )
            for watched, module in seen:
                watched.see(module)
            moved = [w.key for w, module in self.watch.alive() if w.called and w.moved(module)]
            self.moved = frozenset(name for key in moved for name in self.layers_of.get(key, ()))
        if hooks_on_all_modules() != self.everywhere:
            raise PlanError(
                "a trace goes through containers, and a hook on all modules that was registered after "
                f"Pipeline(...) does not run there; {REMEDY}"
            )
        for name, reference in self.frozen.items():
            if (parameter := reference()) is not None and parameter.requires_grad:
                raise PlanError(
                    f"{name} was frozen when the model was traced, is used on several stages, and requires a "
                    f"gradient now; {REMEDY}"
                )
        for name, (reference, trained) in self.trained.items():
            if (parameter := reference()) is not None and parameter.requires_grad != trained:
                raise PlanError(
                    f"forward read whether {name} requires a gradient when the model was traced, and goes on "
                    f"from {trained}, which is {not trained} now; {REMEDY}"
                )
        if other := next((read for read in self.outside if read.changed()), None):
            raise PlanError(
                f"forward goes on from {other.name}, which its code ({other.where}) read when the model was "
                f"traced, and that is another now; {REMEDY}"
            )

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The block in which all modules stand as ``model.eval()`` puts them; then as they stood before."""
        pairs = zip(self.watch.modules, self.asleep, strict=True)
        alive = [(module, flag) for w, flag in pairs if (module := w.module()) is not None]
        before = [module.training for module, _ in alive]
        try:
            for module, flag in alive:
                module.training = flag
            yield
        finally:
            for (module, _), flag in zip(alive, before, strict=True):
                module.training = flag


def _on_several(
    model: nn.Module, traced: Traced, stage_of: Sequence[int]
) -> tuple[set[int], dict[str, weakref.ref[nn.Parameter]]]:
    """What several stages use: the modules in eval mode (their id) with such a buffer, the frozen parameters.

    A cut there would have been refused if they had been in train mode, or trained."""
    stages: dict[int, set[int]] = {}
    last = max(stage_of)
    readers = [*zip(((layer,) for layer in traced.layers), stage_of, strict=True), ((), last)]
    for layers, stage in readers:
        parts = parts_of(model, traced, layers, output=not layers)
        modules = parts.modules.values()
        held = [*parts.tensors.values(), *(t for m in modules for t in (*m.parameters(), *m.buffers()))]
        for tensor in held:
            stages.setdefault(tensor.untyped_storage()._cdata, set()).add(stage)

    def spread(tensor: torch.Tensor) -> bool:
        return len(stages.get(tensor.untyped_storage()._cdata, ())) > 1

    asleep = {id(m) for m in model.modules() if not m.training and any(map(spread, m.buffers(recurse=False)))}
    frozen = {n: weakref.ref(p) for n, p in model.named_parameters() if not p.requires_grad and spread(p)}
    return asleep, frozen
