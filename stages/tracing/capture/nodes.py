"""The nodes of a recording: which tensor is the result of which, and what holds for each.

It knows tensors and modules, and nothing of how a run is watched."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
import pathlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from ...device import autocast, autocast_state, home_of
from ...meta_watch import tensors_in
from ...seeds import generators_of
from ...torch_private import pytree, tree_flatten, tree_is_leaf, tree_leaves

FACTS = frozenset(
    "size dim stride numel nelement ndimension element_size storage_offset is_floating_point is_complex "
    "is_signed is_contiguous is_same_size get_device __len__ __hash__ untyped_storage data_ptr "
    "__dlpack_device__".split()
)
"""Methods that tell the geometry of a tensor and nothing of its elements."""
SHAPE = frozenset({"size", "numel", "nelement", "__len__", "stride", "is_same_size"})
_ARITHMETIC = frozenset("add_ sub_ mul_ div_ pow_ remainder_ floor_divide_".split())
_REFLECTED = {f"r{n}": n for n in "add sub mul div truediv floordiv pow mod matmul and or xor".split()}
_PYTHON = os.path.dirname(os.__file__) + os.sep
OURS = str(pathlib.Path(__file__).parents[2]) + os.sep
_NOT_THE_MODEL = (os.path.dirname(torch.__file__) + os.sep, OURS, "<")


def items_of(value: Any) -> tuple[Callable[..., Any], list[tuple[Any, Any]]]:
    """Return the function that picks the parts of a result, and the key and value of each."""
    if isinstance(value, Mapping):
        return operator.getitem, list(value.items())
    if isinstance(value, tuple | list):
        return operator.getitem, list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return getattr, [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return operator.getitem, []


def plain(result: Any) -> Any:
    """Return what was read of a tensor, as values that can be compared; None: nothing was."""
    value = result.tolist() if hasattr(result, "tolist") else result
    return value if isinstance(value, bool | int | float | complex | str | list | tuple) else None


def node_name(name: str) -> str:
    """The name that torch.fx gives to the node of such a call."""
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        return _REFLECTED.get(name, name)
    return name.removesuffix("_") if name in _ARITHMETIC else name  # `x += y` is an addition there


def rebuilt(spec: pytree.TreeSpec, *leaves: Any) -> Any:
    """A structure put together from its leaves: what a node can be given only as a value of its own."""
    return pytree.tree_unflatten(list(leaves), spec)


def is_code_of_model(file: str) -> bool:
    """Return whether code in ``file`` is neither torch's nor ours nor Python's own."""
    installed = f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file
    return not file.startswith(_NOT_THE_MODEL) and (installed or not file.startswith(_PYTHON))


def asking(frame: types.FrameType | None) -> types.CodeType | None:
    """The code that had Python's own run ``frame``; None where it is not the model's."""
    while frame is not None and not is_code_of_model(frame.f_code.co_filename):
        if not frame.f_code.co_filename.startswith((_PYTHON, "<frozen")):
            return None
        frame = frame.f_back
    return frame.f_code if frame is not None else None


def line_of_model() -> str:
    """``file:line`` of the code that runs now: the innermost that is neither torch's nor ours."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_MODEL):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def numbers_in(item: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield keys and value of every number in nested tuples, lists and dicts."""
    if type(item) in (bool, int, float):
        yield path, item
    elif type(item) in (tuple, list):
        for i, one in enumerate(item):
            yield from numbers_in(one, (*path, i))
    elif type(item) is dict:
        for key, one in item.items():
            yield from numbers_in(one, (*path, key))


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
        now = self.now(self.kind)
        cast = contextlib.nullcontext()
        if now[1:] != self[1:]:
            device = torch.device(self.kind)
            cast = autocast(self.dtype, enabled=self.autocast, cache=self.cache, device=device)
        with torch.set_grad_enabled(self.grad), cast:
            yield


class Unrecordable(Exception):
    """The run did what no list of nodes can repeat: in the module at ``path``, on line ``where``."""

    def __init__(self, what: str, *, path: str, where: str) -> None:
        super().__init__(what)
        self.what, self.path, self.where = what, path, where


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
        attributes = [
            (f"{path}.{name}".removeprefix("."), item)
            for path, module in model.named_modules()
            for name, item in vars(module).items()
            if isinstance(item, torch.Tensor)  # not registered: read from there in every run
        ]
        held = [*attributes, *model.named_buffers(), *model.named_parameters()]
        self.generators = generators_of(tensor for _, tensor in held)
        self.names = {id(tensor): name for name, tensor in held}
        self.held = [tensor for _, tensor in held]  # alive, so that no other tensor gets such an id
        self.nodes: dict[int, tuple[Callable[[], torch.Tensor | None], fx.Node]] = {}

    def is_unrecorded(self) -> bool:
        """Return whether what runs is not recorded: a layer from within, or what another thread does."""
        return bool(self.quiet) or threading.get_ident() != self.thread

    def input(self, name: str, tensor: torch.Tensor) -> None:
        """The next input of the model."""
        self._bind(tensor, self.tag(self.graph.placeholder(name), None))

    def named(self, item: Any) -> Any:
        """``item`` with a node in the place of each tensor, and of each structure around some that torch.fx
        would hand on as something else."""
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
                raise self.unrecordable(
                    f"a tensor of shape {tuple(tensor.shape)} was made where recording cannot see it "
                    "(torch.func transforms, torch.jit, a C++ extension)"
                )

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
        """Raise Unrecordable where Python is about to read what was drawn at random, and nothing else."""
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
        tensors = tensors_in(result)
        if any(tensor.is_nested for tensor in tensors):
            raise self.unrecordable("a nested tensor was made, which has no shape that could be told")
        args, kwargs = given
        node = self.tag(self.graph.create_node(op, target, tuple(args), dict(kwargs), name=name), expect)
        node.meta["sizes"] = [tuple(tensor.shape) for tensor in tensors]
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


def follow_inputs(nodes: Iterable[fx.Node], constants: Iterable[str]) -> set[fx.Node]:
    """The ``nodes``, in running order, whose results follow from the inputs and from ``constants`` alone."""
    found, named = set[fx.Node](), {*constants}
    for node in nodes:
        is_given = node.op == "placeholder" or (node.op == "get_attr" and str(node.target) in named)
        is_call = node.op == "call_function" and not {"drew", "opaque"} & node.meta.keys()
        if is_given or (is_call and found.issuperset(node.all_input_nodes)):
            found.add(node)
    return found
