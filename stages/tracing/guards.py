"""Guards: what a trace relies on, held against the model ahead of every step.

A trace runs the forward of a container once and bakes in what it reads there: numbers, lists, objects, which
module is called; hooks, children and a forward that come later are not in it. Layers run as they are and
read their own attributes anew; of them only the tensors must stay who they are. A changed flag
(``model.layer1.eval()``) is honoured where no container's forward read it, and refused elsewhere.

Only what was read is compared, and always with the trace: a change that was refused once is refused again.
A rank may drop the layers of others, so modules are held weakly; one that is gone has nothing to say."""

import contextlib
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ...compression.errors import PlanError
from ..device import CPU, autocast_state
from ..torch_private import HOOKS, REGISTERED, hooks_on_all_modules, memory_id
from .aliases import in_memory_of
from .capture.reads import ABSENT, ALL, ASKS, DROPPED, Guard, changed_fact, same_to_readers
from .dataflow import POOL_MODULES, RELU_FUNCTIONS, RELU_MODULES, is_unmodified
from .layers import Traced, parts_of, tensors_read
from .model_checks import refuse_autocast
from .object_snapshot import INTERNAL, OF_EVERY, Facts, Same, contents, data_of, is_plain, written_kinds

REMEDY = "set it back, or make the Pipeline anew and load its state_dict()"
NOT_SETTINGS = OF_EVERY | INTERNAL
_REGISTERED, _HOOKS = operator.itemgetter(*REGISTERED), operator.itemgetter(*HOOKS)
Read = tuple[str, str]


def _refuse_difference(change: tuple[str, str, str] | None, where: str = "") -> None:
    if change is not None:
        name, was, now = change
        by = f"its code ({where})" if where else "which"
        raise PlanError(
            f"{name} was {was} when the model was traced, {by} read it once, and is {now} now; {REMEDY}"
        )


def model_guards(model: nn.Module, reads: Collection[Read], layers: Collection[int]) -> Iterator[Guard]:
    """Yield guards on what a trace read of ``model``; ``layers``: ids of modules in layers, of whose classes
    only what was read from outside counts."""
    updated, modules = in_memory_of(model), {id(module) for module in model.modules()}
    look = functools.partial(contents, enters=lambda item: id(item) not in modules, unversioned=updated)
    known: dict[int, Facts | None] = {}
    names: dict[str, set[str]] = {}
    for path, name in reads:
        names.setdefault(path, set()).add(name)
    of_class: dict[type, dict[str, None]] = {}
    for path, module in model.named_modules():
        start, wanted = f"{path}." if path else "", names.get(path, set())
        if ALL in wanted:
            wanted = {*wanted, *vars(module)}
            yield Guard.of(f"{start}__dict__", _read_of(module, lambda m: frozenset(vars(m))))
        for name in sorted(wanted - NOT_SETTINGS - {ALL, "forward"} | wanted & {"training"}):
            read = _read_of(module, lambda m, n=name: vars(m).get(n, ABSENT))
            yield Guard.of(f"{start}{name}", read, look, known=known)
        # An attribute of an object stands before that of its class, and one of a class before that of a base.
        kinds = written_kinds(module)
        data = [name for kind in kinds for name in data_of(kind)]
        counted = data if id(module) not in layers or ALL in wanted else []
        for kind in kinds:
            of_class.setdefault(kind, {}).update(dict.fromkeys([*counted, *sorted(wanted)]))
    for kind, attributes in of_class.items():
        for name in attributes:
            value = vars(kind).get(name, ABSENT)
            if not name.startswith("__") and (value is ABSENT or name in data_of(kind)):
                read = functools.partial(vars(kind).get, name, ABSENT)
                yield Guard.of(f"{kind.__name__}.{name}", read, look, known=known)
    for name, parameter in model.named_parameters():
        if ("", ASKS) in reads or (name, ASKS) in reads:
            read = _read_of(parameter, lambda p: p.requires_grad)
            yield Guard.of(f"whether {name} requires a gradient", read)


def _read_of(item: Any, get: Callable[[Any], Any]) -> Callable[[], Any]:
    """Read something of a module or parameter, which may be dropped."""
    refer = weakref.ref(item)
    return lambda: DROPPED if (there := refer()) is None else get(there)


def _torch_guards(*, proves: bool) -> Iterator[Guard]:
    """Yield the guards on how torch is set; ``proves``: zeros of ReLUs and pools may stop gradients."""
    yield Guard.of("the default dtype", torch.get_default_dtype)
    yield Guard.of("the set of hooks on all modules", hooks_on_all_modules)
    for name in RELU_FUNCTIONS if proves else ():
        read = functools.partial(vars(functional).get, name)
        yield Guard.of(f"torch.nn.functional.{name}, behind whose zeros a gradient may stop,", read)


class _ModuleState:
    """State of one module: its class, hooks and registered parts; of a layer, its settings too.

    ``changed`` compares identities and costs about a microsecond."""

    def __init__(self, path: str, module: nn.Module, *, is_layer: bool) -> None:
        self.path, self.is_layer, self.key = path, is_layer, id(module)
        self.module, self.names = weakref.ref(module), frozenset(vars(module))
        self.proves = type(module) in (*RELU_MODULES, *POOL_MODULES) and is_unmodified(module)
        self.awake = module.training
        self.code, self.registered = _code(module), _registered(module)
        self.settings = {
            name: value
            for name, value in vars(module).items()
            if (name == "training" or name not in NOT_SETTINGS) and is_plain(value)
        }
        self.see(module)

    def see(self, module: nn.Module) -> None:
        """Take it as it is now for unchanged."""
        self.identities = _identities(module)
        # An identity is one only while its object lives: of some it is noted when they die.
        self.dead: list[object] = []
        hooks = (hook for kind in _HOOKS(vars(module)) for hook in kind.values())
        parts = (part for part in (*_parts(module).values(), *hooks) if type(part).__weakrefoffset__)
        self.alive = [weakref.ref(part, self.dead.append) for part in parts]
        self.plain = [value for value in vars(module).values() if is_plain(value)]

    def changed(self, module: nn.Module) -> bool:
        return bool(self.dead) or _identities(module) != self.identities

    def moved(self, module: nn.Module) -> bool:
        """Return whether it is set in another way than in tracing."""
        held = vars(module)
        same = all(same_to_readers(old, held.get(name, ABSENT)) for name, old in self.settings.items())
        return not same or held.keys() > self.names or self.rebuilt(module)

    def rebuilt(self, module: nn.Module) -> bool:
        """Return whether it has another class, forward or other hooks than in tracing."""
        return _code(module) != self.code or "forward" in vars(module).keys() - self.names

    def refuse(self, module: nn.Module) -> None:
        """Raise PlanError for a change that cannot be honoured."""
        where = self.path or "the model"
        rebuilt, registered = self.rebuilt(module), _registered(module)
        if not self.is_layer and (rebuilt or registered != self.registered):
            raise PlanError(
                f"the trace went through {where}, and its class, forward, hooks, children or own tensors, "
                f"which were changed after Pipeline(...), would not count; {REMEDY}"
            )
        _refuse_difference(changed_fact(self.registered, registered, self.path))
        if self.proves and rebuilt:
            raise PlanError(
                f"a gradient may stay behind where {where} gives zeros, as it was a plain layer when it was "
                f"traced, and now it has another class, a hook or a forward of its own; {REMEDY}"
            )


def _identities(module: nn.Module) -> list[Any]:
    """Identities of class, attributes, registered parts and hooks: equal while nothing was exchanged."""
    held = module.__dict__
    parts = itertools.chain(held.values(), *(parts.values() for parts in _REGISTERED(held)))
    found: list[Any] = [type(module), type(module).forward, *map(id, parts)]
    for hooks in _HOOKS(held):
        if hooks:
            found += [*hooks, *map(id, hooks.values())]
    return found


def _code(module: nn.Module) -> list[tuple[Any, Any]]:
    """All that says what a module does."""
    hooks = [item for kind in _HOOKS(vars(module)) for item in kind.items()]
    return [(type(module), type(module).forward), *((handle, Same(hook)) for handle, hook in hooks)]


def _parts(module: nn.Module) -> dict[str, Any]:
    pairs = (pair for parts in _REGISTERED(vars(module)) for pair in parts.items())
    return {name: part for name, part in pairs if part is not None}


def _registered(module: nn.Module) -> Facts:
    return {name: (type(part), Same(part)) for name, part in _parts(module).items()}


class ModelGuards:
    """Holds ``model`` against its traces; modules that the user drops are watched no longer.

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
        layers = set[int]()
        for mode, traced in traces.items():
            for node in (layer.node for layer in traced.layers if layer.node.op == "call_module"):
                inside = {id(module) for module in model.get_submodule(str(node.target)).modules()}
                layers |= inside
                for key in inside if mode == "train" else ():
                    self.layers_of.setdefault(key, set()).add(node.name)
        named = model.named_modules()
        self.modules = [_ModuleState(path, m, is_layer=id(m) in layers) for path, m in named]
        reads, flags, self.code = _reads_of(traces)
        proves = any(state.proves for state in self.modules)
        self.guards = [*_torch_guards(proves=proves), *model_guards(model, reads, layers)]
        self.guards += self.code.values()
        self.flags = [*model_guards(model, flags, layers)]
        every = {(path, name) for path, module in model.named_modules() for name in vars(module)}
        # By name, on what these traces did not read and others may.
        self.others = {guard.name: guard for guard in model_guards(model, {*every, ("", ASKS)}, layers)}
        self.asleep = [module.training for module in roots["eval"].modules()]
        self.states, self.frozen = _on_several(model, traces["train"], stage_of)
        self.moved: frozenset[str] = frozenset()

    def extend(self, traces: Mapping[str, Traced]) -> None:
        """Hold the model against other traces too; PlanError if what they read has changed since the
        first."""
        reads, flags, code = _reads_of(traces)
        known = {guard.name for guard in (*self.guards, *self.flags)}
        new = [guard for guard in self._on(reads) if guard.name not in known]
        for guard in new:
            _refuse_difference(guard.difference())
        self.guards += [*new, *(guard for key, guard in code.items() if key not in self.code)]
        self.flags += [guard for guard in self._on(flags) if guard.name not in known]
        self.code |= code
        calls = (layer.node for layer in traces["train"].layers if layer.node.op == "call_module")
        for node, state in itertools.product(calls, self.modules):
            if f"{state.path}.".startswith(f"{node.target}."):
                self.layers_of.setdefault(state.key, set()).add(node.name)
        self._note_moved()

    def _on(self, reads: Collection[Read]) -> Iterator[Guard]:
        """Yield guards on these ``reads``, made with this, but for what was not there then."""
        states = {state.path: state for state in self.modules}
        for path, name in reads:
            start = f"{path}." if path else ""
            prefix = {ALL: start, ASKS: f"whether {path}"}.get(name)
            if prefix is not None:
                yield from (guard for key, guard in self.others.items() if key.startswith(prefix))
            elif (key := f"{start}{name}") in self.others:
                yield self.others[key]
            elif name not in states[path].names and (module := states[path].module()) is not None:
                read = _read_of(module, lambda m, n=name: vars(m).get(n, ABSENT))
                yield Guard(key, "", read, lambda _: None, ABSENT, None)

    def _note_moved(self) -> None:
        moved = [state.key for state, module in self._alive() if state.is_layer and state.moved(module)]
        self.moved = frozenset(name for key in moved for name in self.layers_of.get(key, ()))

    def _alive(self) -> list[tuple[_ModuleState, nn.Module]]:
        return [(state, module) for state in self.modules if (module := state.module()) is not None]

    def check(self, mode: str) -> None:
        """Refuse what has changed since the trace and cannot be honoured; note in ``moved`` the names of the
        layers whose modules are set in another way than then.

        Args:    mode: "train" for a step; "eval": the training flags are going to be ``evaluating``."""
        refuse_autocast()
        changed = [(state, module) for state, module in self._alive() if state.changed(module)]
        for state, module in changed:
            state.refuse(module)
        known: dict[int, Facts] = {}
        for guard in (*self.guards, *self.flags) if mode == "train" else self.guards:
            _refuse_difference(guard.difference(known), guard.where)
        for state, module in changed if mode == "train" else ():
            if state.key in self.states and module.training and not state.awake:
                raise PlanError(
                    f"{state.path or 'the model'} was in eval mode when the model was cut; in train "
                    f"mode it writes to a buffer that several stages use; {REMEDY}"
                )
        if changed:
            for state, module in changed if mode == "train" else ():
                state.see(module)
            self._note_moved()
        for name, reference in self.frozen.items():
            if (parameter := reference()) is not None and parameter.requires_grad:
                raise PlanError(
                    f"{name} was frozen when the model was traced, is used on several stages, and requires a "
                    f"gradient now; {REMEDY}"
                )

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The block in which all modules stand as ``model.eval()`` puts them; then as they stood before."""
        pairs = zip(self.modules, self.asleep, strict=True)
        alive = [(module, flag) for state, flag in pairs if (module := state.module()) is not None]
        before = [module.training for module, _ in alive]
        try:
            for module, flag in alive:
                module.training = flag
            yield
        finally:
            for (module, _), flag in zip(alive, before, strict=True):
                module.training = flag


def _reads_of(traces: Mapping[str, Traced]) -> tuple[set[Read], set[Read], dict[object, Guard]]:
    """Reads of traces, but for flags, which count in training only; those of flags; guards on their code."""
    reads = {read for traced in traces.values() for read in traced.reads if read[1] != "training"}
    flags = {read for read in traces["train"].reads if read[1] == "training"}
    guards = (guard for traced in traces.values() for guard in traced.guards)
    return reads, flags, {(guard.name, guard.where, id(guard.value)): guard for guard in guards}


def _on_several(
    model: nn.Module, traced: Traced, stage_of: Sequence[int]
) -> tuple[set[int], dict[str, weakref.ref[nn.Parameter]]]:
    """Modules in eval mode (their id) with a buffer of several stages, and the frozen parameters of several:
    in train mode, or trained, they would have refused that cut."""
    stages: dict[int, set[int]] = {}
    parts, nodes = parts_of(model, traced), [*(layer.node for layer in traced.layers), traced.output]
    for node, stage in zip(nodes, [*stage_of, max(stage_of)], strict=True):
        for _, tensor in tensors_read(node, parts):
            stages.setdefault(memory_id(tensor), set()).add(stage)

    def spread(tensor: torch.Tensor) -> bool:
        return len(stages.get(memory_id(tensor), ())) > 1

    asleep = {id(m) for m in model.modules() if not m.training and any(map(spread, m.buffers(recurse=False)))}
    frozen = {n: weakref.ref(p) for n, p in model.named_parameters() if not p.requires_grad and spread(p)}
    return asleep, frozen


def traced_state(model: nn.Module) -> tuple[Any, ...]:
    """Return all that a trace of ``model`` could read: equal as long as none of it has changed."""
    modules, tensors = list(model.modules()), [*model.parameters(), *model.buffers()]
    facts = contents(model, unversioned=in_memory_of(model))
    return (
        {path: fact for path, fact in facts.items() if path.rpartition(".")[2] != "training"},
        [module.training or not model.training for module in modules],
        [Same(kind.forward) for kind in dict.fromkeys(map(type, modules))],
        [guard.value for guard in _torch_guards(proves=True)],
        [(t.requires_grad, t.shape, t.dtype, t.layout) for t in tensors],
        [(t.stride(), t.data_ptr()) for t in tensors if t.layout is torch.strided],
        torch.are_deterministic_algorithms_enabled(),
        [autocast_state(at) for at in {CPU: None} | {t.device: None for t in tensors if not t.is_meta}],
    )
