"""The nodes of a recording: which tensor is the result of which, and what holds for each.

It knows tensors and modules, and nothing of how a run is watched.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from ...autocast import autocast, autocast_state
from ...meta_watch import tensors_in
from ...places import home_of
from ...seeds import generators_of
from ...torch_private import tree_flatten, tree_is_leaf, tree_leaves
from .values import items_of, line_of_model, rebuilt


class Modes(NamedTuple):
    """State of grad mode, and of autocast on devices of a ``kind``."""

    grad: bool
    autocast: bool
    dtype: torch.dtype
    cache: bool
    kind: str

    @classmethod
    def now(cls, kind: str) -> Modes:
        """Those of this moment."""
        state, cache = autocast_state(torch.device(kind)), torch.is_autocast_cache_enabled()
        return cls(torch.is_grad_enabled(), *state, cache, kind)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The block in which they hold."""
        now = Modes.now(self.kind)
        cast = contextlib.nullcontext()
        if now[1:] != self[1:]:
            device = torch.device(self.kind)
            cast = autocast(self.dtype, enabled=self.autocast, cache=self.cache, device=device)
        with torch.set_grad_enabled(self.grad), cast:
            yield


_OUT_OF_SIGHT = "made where recording cannot see it (torch.func transforms, torch.jit, a C++ extension)"


class Unrecordable(Exception):
    """The run did something that no list of nodes can repeat: in the module at ``path``, on line
    ``where``."""

    def __init__(self, what: str, *, path: str, where: str) -> None:
        super().__init__(what)
        self.what, self.path, self.where = what, path, where


def _attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that hang on modules under a name and are not registered: read from there in every run."""
    for path, module in model.named_modules():
        for name, item in vars(module).items():
            if isinstance(item, torch.Tensor):
                yield f"{path}.{name}" if path else name, item


class Nodes:
    """A graph that grows by a node for each call of ``model``; ``stack`` are the modules that run now.

    In a node's ``meta``: ``nn_module_stack`` as torch.fx has it, ``where`` the file and line of the model's
    code, ``modes`` (grad mode and autocast) where they differ from those around the run, ``expect`` for a
    guard, ``segment`` the number of the reentrant checkpoint in which it ran, ``shape`` where Python read the
    shape of its result, ``sizes`` the shapes of the tensors in it."""

    def __init__(self, model: nn.Module) -> None:
        self.quiet, self.thread = 0, threading.get_ident()
        self.segment, self.segments = 0, 0
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.kind = home_of(model).type
        self.outside = Modes.now(self.kind)
        self.stack: list[tuple[str, type]] = [("", type(model))]
        held = [*_attributes(model), *model.named_buffers(), *model.named_parameters()]
        self.generators = generators_of(tensor for _, tensor in held)
        self.names = {id(tensor): name for name, tensor in held}
        self.held = [tensor for _, tensor in held]  # alive, so that no other tensor gets such an id
        self.nodes: dict[int, tuple[Callable[[], torch.Tensor | None], fx.Node]] = {}

    def is_unrecorded(self) -> bool:
        """Return whether what runs is not recorded: a layer from within, or what another thread does."""
        return bool(self.quiet) or threading.get_ident() != self.thread

    def in_segment(self, run: Callable[..., Any], *args: Any) -> Any:
        """Run one reentrant checkpoint, whose parts are seen."""
        self.segments += 1
        before, self.segment = self.segment, self.segments
        try:
            return run(*args)
        finally:
            self.segment = before

    def input(self, name: str, tensor: torch.Tensor) -> None:
        """The next input of the model."""
        self._bind(tensor, self.tag(self.graph.placeholder(name), None))

    def named(self, item: Any) -> Any:
        """``item`` with a node in the place of every tensor, and of every structure around tensors that
        torch.fx would hand on as something else."""
        kind = type(item)
        if kind is tuple or kind is list:
            return kind(map(self.named, item))
        if kind is dict:
            return {key: self.named(part) for key, part in item.items()}
        if isinstance(item, torch.Tensor):
            return self.node_of(item)
        if tree_is_leaf(item):
            return item
        leaves, spec = tree_flatten(item)
        if not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            return item
        given: tuple[Any, ...] = (spec, *map(self.named, leaves))
        return self.tag(self.graph.call_function(rebuilt, given), None)

    def known(self, tensor: torch.Tensor) -> fx.Node | None:
        """The node whose result ``tensor`` is, None for any other tensor."""
        kept, node = self.nodes.get(id(tensor), (lambda: None, None))
        return node if kept() is tensor else None

    def node_of(self, tensor: torch.Tensor) -> fx.Node:
        """That node, or one that reads a tensor of the model or a constant."""
        node = self.known(tensor)
        if node is None:
            self.refuse_unrecorded(tensor)
            name = self.names.get(id(tensor))
            if name is None:
                name = f"_constant_{len(self.constants)}"
                self.constants[name] = tensor.detach().clone()
                self.held.append(tensor)
            node = self.tag(self.graph.create_node("get_attr", name), None)
            self._bind(tensor, node)
        return node

    def refuse_unrecorded(self, item: Any) -> None:
        """Raise Unrecordable for a tensor with a gradient that no node made."""
        for tensor in tree_leaves(item):
            if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
                continue
            if self.known(tensor) is None and id(tensor) not in self.names:
                raise self.unrecordable(f"a tensor of shape {tuple(tensor.shape)} was {_OUT_OF_SIGHT}")

    def unrecordable(self, what: str) -> Unrecordable:
        """The error for what happens now, with its place."""
        return Unrecordable(what, path=self.stack[-1][0], where=line_of_model())

    def _bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self.nodes[id(tensor)] = weakref.ref(tensor), node

    def tag(self, node: fx.Node, expect: Any) -> fx.Node:
        """Note on a node where and how it ran, and what it must find again."""
        path, kind = self.stack[-1]
        node.meta["nn_module_stack"] = {path: (path, kind)}
        node.meta["where"] = line_of_model()
        if (now := Modes.now(self.kind)) != self.outside:
            node.meta["modes"] = now
        if expect is not None:
            node.meta["expect"] = expect
        if self.segment:
            node.meta["segment"] = self.segment
        return node

    def refuse_chance(self, given: Any) -> None:
        """Raise Unrecordable where Python is about to read what was drawn at random, and from nothing
        else."""
        waiting = [node for node in tree_leaves(given) if isinstance(node, fx.Node)]
        met: set[fx.Node] = set()
        while waiting:
            node = waiting.pop()
            if node.op != "call_function":
                return  # follows data or weights as well, and is checked in every run
            met.add(node)
            waiting += [source for source in node.all_input_nodes if source not in met]
        if any("drew" in node.meta for node in met):
            raise self.unrecordable("it goes on from a number that was drawn at random")

    def emit(self, op: str, target: Any, given: Any, result: Any, name: str, expect: Any = None) -> fx.Node:
        """One more call, and its result."""
        args, kwargs = given
        made = tensors_in(result)
        if any(tensor.is_nested for tensor in made):
            raise self.unrecordable("a nested tensor was made, which has no shape that could be told")
        node = self.tag(self.graph.create_node(op, target, tuple(args), dict(kwargs), name=name), expect)
        node.meta["sizes"] = [tuple(tensor.shape) for tensor in made]
        self._spread(node, result)
        return node

    def _spread(self, node: fx.Node, value: Any) -> None:
        """Give every tensor in a result a node: the result's own, or one that picks it."""
        if isinstance(value, torch.Tensor):
            return self._bind(value, node)
        pick, items = items_of(value)
        for key, item in items:
            if tensors_in(item):
                picked = self.graph.call_function(pick, (node, key))
                self._spread(self.tag(picked, None), item)


def path_of(node: fx.Node) -> str:
    """Dotted path of the module in which a node ran."""
    stack = node.meta.get("nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""


def where_of(node: fx.Node) -> str:
    """Module path, file and line of a node, as far as they are known, for a sentence."""
    path, where = path_of(node), node.meta.get("where")
    return (f" in module {path}" if path else "") + (f" ({where})" if where else "")
