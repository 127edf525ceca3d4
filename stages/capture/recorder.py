"""The nodes of one real eager run, seen through torch's own dispatch.

Real tensors, no proxies and no compiler: every branch and every kernel choice is eager's own. Each torch call
becomes a node; a module of torch.nn, and whatever is named as a leaf, becomes one node as a whole. What the run
read of a tensor into Python (a truth value, a list) becomes a guard: a node that expects what was read.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointFunction

from .buffers import Buffers, only_read
from .modes import Modes
from .patches import Patches, bound, kinds_that_are_called, overridden, wrapped
from .reads import noting
from .values import FACTS, SHAPE, is_foreign, items_of, line_of_model, node_name, plain, rebuilt

_OUT_OF_SIGHT = "made where recording cannot see it (torch.func transforms, torch.jit, a C++ extension)"


class Unrecordable(Exception):
    """The run did something that no list of nodes can repeat: in the module at ``path``, on line ``where``."""

    def __init__(self, what: str, *, path: str, where: str) -> None:
        super().__init__(what)
        self.what, self.path, self.where = what, path, where


class Recorder(TorchFunctionMode):
    """Records what one call of ``model`` does; ``leaf`` says which modules are one node, as are ``functions``.

    ``graph`` grows by a node for each call. In a node's ``meta``: ``nn_module_stack`` as torch.fx has it,
    ``modes`` (grad mode and autocast) where they differ from those around the run, ``expect`` for a guard,
    ``shape`` where Python read the shape of its result, ``sizes`` the shapes of the tensors in it."""

    def __init__(
        self,
        model: nn.Module,
        leaf: Callable[[str, nn.Module], bool],
        functions: Collection[Callable[..., Any]] = (),
        *,
        written: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.graph, self.leaf, self.functions = fx.Graph(), leaf, functions
        self.constants: dict[str, torch.Tensor] = {}
        self.outside = Modes.now()
        self.quiet = 0
        self.stack: list[tuple[str, type]] = [("", type(model))]
        self.paths = {module: path for path, module in model.named_modules()}
        held = [*model.named_buffers(), *model.named_parameters()]
        self.names = {id(tensor): name for name, tensor in held}
        self.held = [tensor for _, tensor in held]  # alive, so that no other tensor gets such an id
        self.nodes: dict[int, tuple[Callable[[], torch.Tensor | None], fx.Node]] = {}
        self.reads: set[tuple[str, str]] = set()
        self.patches, self.buffers = Patches(self._patches()), Buffers(model, written)

    def note_reads(self) -> None:
        """Note which attributes of its modules the run reads by itself, outside of the layers."""
        layers: list[str] = []
        for module, path in self.paths.items():
            if path and self.leaf(path, module):
                layers.append(f"{path}.")
            elif not path.startswith(tuple(layers)):
                module.__class__ = noting(type(module), path, self)

    def input(self, name: str, tensor: torch.Tensor) -> None:
        """The next input of the model."""
        self._bind(tensor, self._tag(self.graph.placeholder(name), None))

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """The block in which the model is called."""
        with self.patches.on(), self:
            yield

    def _patches(self) -> Iterator[tuple[Any, str, Any]]:
        """What does not pass through torch's dispatch: modules, autograd Functions, scripted and wrapped ones."""
        apply, scripted = torch.autograd.Function.__dict__["apply"], torch.jit.ScriptFunction.__call__
        recorder = self

        def applied(function: type, *args: Any, **kwargs: Any) -> Any:
            run = apply.__get__(None, function)
            if function is CheckpointFunction and not recorder.quiet:
                return _flat(*args)
            return recorder.opaque("call_function", run, function.__name__, run, args, kwargs)

        def script(function: Any, *args: Any, **kwargs: Any) -> Any:
            run = functools.partial(scripted, function)
            return recorder.opaque("call_function", run, function.name, run, args, kwargs)

        for kind in kinds_that_are_called():
            yield kind, "__call__", self._called(kind.__call__)
        yield torch.autograd.Function, "apply", classmethod(applied)
        yield torch.jit.ScriptFunction, "__call__", script
        yield torch.overrides, "has_torch_function", overridden
        for frame, name, held in (*wrapped(), *bound(self.functions)):
            yield frame, name, self._opaque_function(name, held)

    def _called(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._module(module, call, args, kwargs)

        return called

    def _opaque_function(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            return self.opaque("call_function", function, name, function, args, kwargs)

        return run

    def _module(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.quiet:
            return call(module, *args, **kwargs)
        path = self.paths.get(module)
        if path and self.leaf(path, module) and self._as_it_was(module):
            name = path.replace(".", "_")
            return self.opaque("call_module", path, name, lambda *a, **k: call(module, *a, **k), args, kwargs)
        self.stack.append((self.stack[-1][0] if path is None else path, type(module)))
        try:
            result = call(module, *args, **kwargs)
            self._refuse_unseen(result)  # here, where it was made, not where it is used
            return result
        finally:
            self.stack.pop()

    def _as_it_was(self, module: nn.Module) -> bool:
        """Whether a module has its own parameters, not those that torch.func.functional_call lends it."""
        return all(id(parameter) in self.names for parameter in module.parameters())

    def opaque(self, op: str, target: Any, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run something as one node, whatever it does inside."""
        if self.quiet:
            return run(*args, **kwargs)
        self.quiet += 1
        try:
            given = self.named((args, kwargs))
            with self.patches.off(self):
                result = run(*args, **kwargs)
            self._emit(op, target, given, result, name)
        finally:
            self.quiet -= 1
        return result

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One call of torch."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "call")
        if self.quiet or name in FACTS or name == "_set_grad_enabled":
            if name in SHAPE and not self.quiet:
                self._read_shape(args)
            return func(*args, **kwargs)
        if name in ("__get__", "__set__", "__delete__"):
            return self._property(func, name, args)
        given, watched = self.named((args, kwargs)), self.buffers.among((args, kwargs))
        result = func(*args, **kwargs)
        for buffer, before in watched:
            if only_read(buffer, before, result):
                given = self._of_copy(given, self._node(buffer))
        if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)) or plain(result) is None:
            self._emit("call_function", func, given, result, node_name(name))
        elif any(isinstance(leaf, fx.Node) for leaf in tree_leaves(given)):
            self._emit("call_function", func, given, None, f"guard_{node_name(name)}", expect=plain(result))
        return result

    def _of_copy(self, given: Any, read: fx.Node) -> Any:
        copied = self._tag(self.graph.call_function(torch.clone, (read,)), None)
        return tree_map(lambda item: copied if item is read else item, given)

    def write_back(self, model: nn.Module) -> None:
        """Write into the buffers that were replaced what they were replaced by, when the run is over."""
        for name, old, new in self.buffers.replaced(model):
            if self._known(new) is None or new.requires_grad or new.shape != old.shape:
                raise self._unrecordable(f"{name} is replaced by what cannot be written into it")
            self._emit(
                "call_function", torch.Tensor.copy_, ((self._node(old), self._node(new)), {}), None, "copy_"
            )

    def _property(self, func: Any, name: str, args: tuple[Any, ...]) -> Any:
        """``x.T`` and ``x.data`` make tensors, ``x.shape`` and ``x.device`` do not."""
        if name != "__get__":
            owner = args[0]
            if isinstance(owner, torch.Tensor) and name == "__set__" and self._known(owner):
                return self._write_property(func, args)
            return func(*args)
        result = func(*args)
        if isinstance(result, torch.Size):
            self._read_shape(args)
        if isinstance(result, torch.Tensor) and not self._known(result) and id(result) not in self.names:
            self._emit("call_function", func, self.named((args, {})), result, "getattr")
        return result

    def _write_property(self, func: Any, args: tuple[Any, ...]) -> Any:
        """``x.data = y`` and ``x.requires_grad = True`` change what the node made."""
        given = self.named((args, {}))
        result = func(*args)
        self._emit("call_function", func, given, None, "setattr")
        return result

    def _read_shape(self, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], torch.Tensor) and (node := self._known(args[0])) is not None:
            node.meta["shape"] = tuple(args[0].shape)

    def named(self, item: Any) -> Any:
        """``item`` with a node in the place of every tensor, and of every structure that is no plain one."""
        return tree_map(self._noded, item, is_leaf=is_foreign)

    def _noded(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return self._node(item)
        if not is_foreign(item):
            return item
        leaves, spec = tree_flatten(item)
        given = (spec, *(self._noded(leaf) for leaf in leaves))
        return self._tag(self.graph.call_function(rebuilt, given), None)

    def _known(self, tensor: torch.Tensor) -> fx.Node | None:
        kept, node = self.nodes.get(id(tensor), (lambda: None, None))
        return node if kept() is tensor else None

    def _node(self, tensor: torch.Tensor) -> fx.Node:
        node = self._known(tensor)
        if node is None:
            self._refuse_unseen(tensor)
            name = self.names.get(id(tensor))
            if name is None:
                name = f"_constant_{len(self.constants)}"
                self.constants[name] = tensor.detach().clone()
                self.held.append(tensor)
            node = self._tag(self.graph.create_node("get_attr", name), None)
            self._bind(tensor, node)
        return node

    def _refuse_unseen(self, item: Any) -> None:
        for tensor in tree_leaves(item):
            if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
                continue
            if self._known(tensor) is None and id(tensor) not in self.names:
                raise self._unrecordable(f"a tensor of shape {tuple(tensor.shape)} was {_OUT_OF_SIGHT}")

    def _unrecordable(self, what: str) -> Unrecordable:
        return Unrecordable(what, path=self.stack[-1][0], where=line_of_model())

    def _bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self.nodes[id(tensor)] = weakref.ref(tensor), node

    def _tag(self, node: fx.Node, expect: Any) -> fx.Node:
        path, kind = self.stack[-1]
        node.meta["nn_module_stack"] = {path: (path, kind)}
        node.meta["where"] = line_of_model()
        if (now := Modes.now()) != self.outside:
            node.meta["modes"] = now
        if expect is not None:
            node.meta["expect"] = expect
        return node

    def _emit(self, op: str, target: Any, given: Any, result: Any, name: str, expect: Any = None) -> None:
        args, kwargs = given
        if any(isinstance(leaf, torch.Tensor) and leaf.is_nested for leaf in tree_leaves(result)):
            raise self._unrecordable("a nested tensor was made, which has no shape that could be told")
        node = self._tag(self.graph.create_node(op, target, tuple(args), dict(kwargs), name=name), expect)
        node.meta["sizes"] = [tuple(t.shape) for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self._spread(node, result)

    def _spread(self, node: fx.Node, value: Any) -> None:
        """Give every tensor in a result a node: the result's own, or one that picks it."""
        if isinstance(value, torch.Tensor):
            return self._bind(value, node)
        pick, items = items_of(value)
        for key, item in items:
            if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(item)):
                picked = self.graph.call_function(pick, (node, key))
                self._spread(self._tag(picked, None), item)


def _flat(run: Callable[..., Any], keep_random: bool, *args: Any) -> Any:
    """What a reentrant checkpoint computes, without dropping and computing it again."""
    graded = any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    with torch.set_grad_enabled(torch.is_grad_enabled() and graded):  # else it gives nobody a gradient
        return run(*args)
