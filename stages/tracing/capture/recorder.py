"""The nodes of one real eager run, seen through torch's own dispatch.

Real tensors, no proxies and no compiler: every branch and every kernel choice is eager's own. Each torch
call becomes a node; a module of torch.nn, and whatever is named as a leaf, becomes one node as a whole. What
the run read of a tensor into Python (a truth value, a list) becomes a guard: a node that expects it."""

import contextlib
import dataclasses
import functools
import operator
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.autograd import Function
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from ...meta_watch import Contents, tensors_in
from ...seeds import TURN, drew, states_of
from ...torch_private import (
    FORWARD_HOOKS,
    is_compiled_in_place,
    memory_id,
    optimized_module,
    paused,
    pytree,
    tree_leaves,
    wrapped_functions,
)
from ..object_snapshot import is_plain, walk
from .dynamic_shapes import called, mapped
from .nodes import FACTS, SHAPE, Nodes, Unrecordable, node_name, numbers_in, plain
from .reads import Reads

_NOTHING = object()  # stood there: the name is taken away again


class Patches:
    """``wanted``: (class, module or dict of globals, name, what stands there while recording)."""

    def __init__(self, wanted: Iterable[tuple[Any, str, Any]]) -> None:
        self.wanted = list(wanted)
        held = [(o if isinstance(o, dict) else vars(o), name) for o, name, _ in self.wanted]
        self.kept = [names.get(name, _NOTHING) for names, name in held]

    @contextlib.contextmanager
    def on(self, *, off: bool = False) -> Iterator[None]:
        """The block that is recorded; ``off``: a block inside it in which everything is as ever."""
        self._put(self.kept if off else None)
        try:
            yield
        finally:
            self._put(None if off else self.kept)

    def _put(self, values: Iterable[Any] | None) -> None:
        values = [new for _, _, new in self.wanted] if values is None else values
        for (owner, name, _), value in zip(self.wanted, values, strict=True):
            if isinstance(owner, dict):
                owner[name] = value
            elif value is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _is_single(module: nn.Module) -> bool:
    """Return whether a module of torch.nn runs no code but torch's, so that what it runs asks for no patch:
    putting them aside for each takes longer than most take to run."""
    return (
        type(module).__module__.startswith("torch.nn.modules.")
        and not any(True for _ in module.children())
        and not (any(vars(module)[name] for name in FORWARD_HOOKS) or is_compiled_in_place(module))
    )


def overridden(tensors: Iterable[Any]) -> bool:
    """Return what torch.overrides.has_torch_function says where nobody records."""
    plain = (torch.Tensor, torch.nn.Parameter)
    return any(type(t) not in plain and hasattr(type(t), "__torch_function__") for t in tensors)


def kinds_that_are_called() -> Iterator[type[nn.Module]]:
    """The classes whose ``__call__`` runs a module."""
    yield nn.Module
    compiled = optimized_module()
    if compiled is not None and "__call__" in vars(compiled):
        yield compiled


Applied = Sequence[tuple[dict[str, Any], str, type]]


def applying() -> Applied:
    """Every name of every imported file that stands for ``apply`` of an autograd Function, which comes last.

    There are a hundred thousand names: it takes some milliseconds."""
    builtin = types.BuiltinMethodType  # compared and not asked: some lazy objects warn when they are
    return [
        (file, name, owner)
        for file, name, held in _names(lambda held: type(held) is builtin)
        if held.__name__ == "apply"
        and isinstance(owner := held.__self__, type)
        and issubclass(owner, Function)
    ]


def _names(wanted: Callable[[Any], bool]) -> list[tuple[dict[str, Any], str, Any]]:
    """Return globals of imported files, names in them, and what is ``wanted`` of what they stand for."""
    files = [vars(file) for file in list(sys.modules.values()) if isinstance(file, types.ModuleType)]
    return [(file, name, held) for file in files for name, held in list(file.items()) if wanted(held)]


def _storage_of(tensor: torch.Tensor) -> int | None:
    return memory_id(tensor) if tensor.layout is torch.strided else None


_COUNTS = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount")
"""Calls whose results are as long as the values of their input say."""

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def flattened(result: Any) -> tuple[list[Any], pytree.TreeSpec, tuple[str, ...]]:
    """Leaves and structure of ``result``, and what was left out of it, by name."""
    _register(result)
    paths, spec = pytree.tree_flatten_with_path(result)
    dropped = []
    for path, leaf in paths:
        if not isinstance(leaf, (torch.Tensor, *_NUMBERS)):
            name = re.sub(r"\['(\w+)'\]", r".\1", pytree.keystr(path)).lstrip(".")
            dropped.append(f"{name or 'its result'} ({type(leaf).__name__})")
    return [x if isinstance(x, (torch.Tensor, *_NUMBERS)) else None for _, x in paths], spec, tuple(dropped)


def _register(result: Any) -> None:
    """Tell torch how to take plain dataclasses apart."""
    for item in pytree.tree_leaves(result):
        kind = type(item)
        params = getattr(kind, "__dataclass_params__", None)
        own = params is not None and params.init and "__init__" in vars(kind)  # else a class like any other
        if own and tensors_in([getattr(item, field.name) for field in dataclasses.fields(item)]):
            pytree.register_dataclass(kind)
            return _register(result)


class Recorder(Nodes, TorchFunctionMode):
    """Records what one call of ``model`` does; ``leaf`` modules are one node, and so are ``functions``.

    ``written`` are the buffers that the call changes; ``reads`` what it reads outside of layers, where it
    ``notes`` attributes of modules too. ``applied`` is what ``applying`` found, None: it looks itself."""

    def __init__(
        self,
        model: nn.Module,
        leaf: Callable[[str, nn.Module], bool],
        functions: Collection[Callable[..., Any]] = (),
        *,
        written: Collection[str] = (),
        expects: Sequence[tuple[Any, Any]] = (),
        notes: bool = False,
        applied: Applied | None = None,
    ) -> None:
        TorchFunctionMode.__init__(self)
        Nodes.__init__(self, model)
        self.leaf, self.functions = leaf, functions
        self.paths = {module: path for path, module in model.named_modules()}
        self.reads, self.notes = Reads(self.paths, self.is_unrecorded), notes
        self.expects, self.patches = list(expects), Patches(())
        self.applied = applied
        named = model.named_parameters(remove_duplicate=False)
        self.buffers = {name: p for name, p in named if not p.requires_grad}
        self.buffers |= dict(model.named_buffers(remove_duplicate=False))
        self.written = {_storage_of(self.buffers[name]) for name in self.buffers.keys() & {*written}}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """The block in which the model is called; one at a time in a process."""
        with TURN:
            self.patches = Patches(self._patches())  # of what stands there now
            with self.patches.on(), self:
                yield

    def _patches(self) -> Iterator[tuple[Any, str, Any]]:
        """Patches for what passes by torch's dispatch."""
        apply, scripted = torch.autograd.Function.__dict__["apply"], torch.jit.ScriptFunction.__call__

        def applied(function: type, *args: Any, **kwargs: Any) -> Any:
            run = apply.__get__(None, function)
            if function is CheckpointFunction and not self.is_unrecorded():
                return self._segment(*args)
            return self.opaque("call_function", run, function.__name__, run, args, kwargs)

        def script(function: Any, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(scripted, function)
            return self.opaque("call_function", run, function.name, run, args, kwargs)

        def run_function(name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            return self.opaque("call_function", function, name, function, args, kwargs)

        def run_module(call: Callable[..., Any]) -> Callable[..., Any]:
            return lambda module, /, *args, **kwargs: self._module(module, call, args, kwargs)

        for kind in kinds_that_are_called():
            yield kind, "__call__", run_module(kind.__call__)
        if self.notes:
            yield nn.Module, "__getattribute__", self.reads.reader()
        yield torch.autograd.Function, "apply", classmethod(applied)
        for frame, name, function in applying() if self.applied is None else self.applied:
            yield frame, name, functools.partial(applied, function)
        yield torch.jit.ScriptFunction, "__call__", script
        yield torch.overrides, "has_torch_function", overridden
        yield torch, "initial_seed", self._initial_seed
        yield torch.random, "initial_seed", self._initial_seed
        wrapped = [(frame, name, frame[name]) for frame, name in wrapped_functions() if name in frame]
        wanted = {id(function) for function in self.functions}
        named = _names(lambda held: id(held) in wanted) if wanted else ()
        for frame, name, held in (*(one for one in wrapped if callable(one[2])), *named):
            yield frame, name, functools.partial(run_function, name, held)

    def _segment(self, run: Callable[..., Any], keep_random: bool, *args: Any) -> Any:
        """Run what a reentrant checkpoint computes, as it is seen, without computing it again."""
        self.segments += 1
        before, self.segment = self.segment, self.segments
        # Without an input that has a gradient it gives nobody one.
        graded = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
        try:
            with torch.set_grad_enabled(torch.is_grad_enabled() and graded):
                return run(*args)
        finally:
            self.segment = before

    def _initial_seed(self) -> int:
        """Layers are seeded one by one, so only inside of one does the seed say anything."""
        raise self.unrecordable("it reads torch.initial_seed(), which each layer has its own of")

    def _module(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.is_unrecorded():
            return call(module, *args, **kwargs)
        path = self.paths.get(module)
        self.stack.append((self.stack[-1][0] if path is None else path, type(module)))
        try:
            if path and (single := self._is_layer(path, module)) is not None:
                run, name = functools.partial(call, module), path.replace(".", "_")
                return self.opaque("call_module", path, name, run, args, kwargs, single=single)
            result = call(module, *args, **kwargs)
            self.refuse_unrecorded(result)  # here, where it was made, not where it is used
            return result
        finally:
            self.stack.pop()

    def _is_layer(self, path: str, module: nn.Module) -> bool | None:
        """Return whether a module that is one layer runs torch's code alone; None: it is not one layer."""
        self.quiet += 1  # it is not the model that looks
        try:
            # torch.func.functional_call may lend a module other parameters than its own
            own = self.leaf(path, module) and all(id(p) in self.names for p in module.parameters())
            if own and type(module).__module__.startswith("torch.nn."):
                # if forward writes to its frozen parameters its calls are recorded, which read copies
                own = not any(_storage_of(p) in self.written for p in module.parameters())
            return _is_single(module) if own else None
        finally:
            self.quiet -= 1

    def opaque(
        self,
        op: str,
        target: Any,
        name: str,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        single: bool = False,
    ) -> Any:
        """Run something as one node, whatever it does inside."""
        if self.is_unrecorded():
            return run(*args, **kwargs)
        self.quiet += 1
        try:
            for leaf in (target, *tree_leaves((args, kwargs))):
                self._refuse_hidden(name, leaf)
            given = self.named((args, kwargs))
            with contextlib.nullcontext() if single else self.patches.on(off=True), paused(self):
                result = run(*args, **kwargs)
            node = self.emit(op, target, given, result, name)
            node.meta["opaque"] = True
            self._guard_numbers(node, result)
            return result
        finally:
            self.quiet -= 1

    def _refuse_hidden(self, name: str, item: object) -> None:
        """Refuse an object around tensors of the model, which a stage would read in the recorder's copy."""
        if isinstance(item, torch.Tensor | str) or is_plain(item):
            return
        for root in (item, getattr(item, "__self__", None)):  # a class, where it was made in forward
            for _, part, _ in walk(root):
                if isinstance(part, torch.Tensor) and id(part) in self.names:
                    raise self.unrecordable(
                        f"{name} is handed {self.names[id(part)]} of the model inside of a "
                        f"{type(item).__name__}; hand it the tensors that it reads"
                    )

    def _guard_numbers(self, node: fx.Node, result: Any) -> None:
        """Hold the numbers that an opaque node returns to what they are: Python may go on from them."""
        if not tensors_in(result) and (value := plain(result)) is not None:
            node.meta["expect"] = value
            return
        for path, number in numbers_in(result):
            picked = node
            for key in path:
                picked = self.tag(self.graph.call_function(operator.getitem, (picked, key)), None)
            picked.meta["expect"] = number

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One call of torch."""
        # 1. what is no node: a layer from within, questions about a shape, properties
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "call")
        if self.quiet or name in FACTS or name == "_set_grad_enabled":
            if name in SHAPE and not self.quiet:
                self._read_shape(args)
            return func(*args, **kwargs)
        if name == "__dlpack__":
            raise self.unrecordable("its elements are handed to another library")
        if name in ("__get__", "__set__", "__delete__"):
            return self._property(func, name, args)
        if any(callable(leaf) and not isinstance(leaf, type) for leaf in tree_leaves((args, kwargs))):
            raise self.unrecordable(f"a function is handed to {name}, which may read what it likes")
        # 2. the call itself, on real tensors
        given, watched = self.named((args, kwargs)), list[tuple[torch.Tensor, Contents]]()
        if self.written and torch.is_grad_enabled():
            buffers = (t for t in tensors_in((args, kwargs)) if _storage_of(t) in self.written)
            watched = [(buffer, Contents([buffer])) for buffer in buffers]
        states = states_of(self.generators)
        if self.expects and called(func) == called(self.expects[0][0]):  # nothing can be read of no memory
            result = self.expects.pop(0)[1]
        else:
            result = func(*args, **kwargs)
        # 3. a buffer that is written to later is read as it is now
        for buffer, before in watched:
            results, memory = tensors_in(result), _storage_of(buffer)
            is_viewed = any(_storage_of(t) == memory for t in results)
            if not is_viewed and any(t.requires_grad for t in results) and not before.changed():
                read = self.node_of(buffer)
                copied = self.tag(self.graph.call_function(torch.clone, (read,)), None)
                given = mapped(given, fx.Node, lambda node, r=read, c=copied: c if node is r else node)
        # 4. a node for what it made, or a guard for what Python read of a tensor
        if tensors_in(result) or plain(result) is None:
            node = self.emit("call_function", func, given, result, node_name(name))
            if drew(self.generators, states):
                node.meta["drew"] = True
            masks = (t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1:]))
            by_mask = name == "__getitem__" and any(masks)
            repeats = name == "repeat_interleave" and len(tensors_in((args, kwargs))) > 1
            by_value = repeats or (name == "one_hot" and len(args) + len(kwargs) == 1)
            if name in _COUNTS or by_mask or by_value or (name == "where" and len(args) == 1):
                node.meta["counts"] = True
        elif any(isinstance(leaf, fx.Node) for leaf in tree_leaves(given)):
            self.refuse_chance(given)
            self.emit("call_function", func, given, None, f"guard_{node_name(name)}", expect=plain(result))
        return result

    def write_back(self, model: nn.Module) -> None:
        """Write into the buffers that were replaced what they were replaced by, when the run is over."""
        for name, new in model.named_buffers(remove_duplicate=False):
            old = self.buffers.get(name, new)
            if old is new:
                continue
            if self.known(new) is None or new.requires_grad or new.shape != old.shape:
                what = (
                    f"{name} is replaced by what cannot be written into it (where only the first run does "
                    "so, call the model once, under torch.no_grad(), before it is traced)"
                )
                raise Unrecordable(what, path="", where="")  # no line of the model runs any more
            given = (self.node_of(old), self.node_of(new)), {}
            self.emit("call_function", torch.Tensor.copy_, given, None, "copy_")

    def _property(self, func: Any, name: str, args: tuple[Any, ...]) -> Any:
        """``x.T`` and ``x.data`` make tensors, ``x.shape`` and ``x.device`` do not."""
        if name != "__get__":
            if name != "__set__" or not isinstance(args[0], torch.Tensor) or not self.known(args[0]):
                return func(*args)
            given = self.named((args, {}))  # x.data = y and x.requires_grad = True change what the node made
            result = func(*args)
            self.emit("call_function", func, given, None, "setattr")
            return result
        self.reads.of_tensor(func, self.names.get(id(args[0])))
        result = func(*args)
        if isinstance(result, torch.Size):
            self._read_shape(args)
        if isinstance(result, torch.Tensor) and not self.known(result) and id(result) not in self.names:
            self.emit("call_function", func, self.named((args, {})), result, "getattr")
        return result

    def _read_shape(self, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], torch.Tensor) and (node := self.known(args[0])) is not None:
            node.meta["shape"] = tuple(args[0].shape)
