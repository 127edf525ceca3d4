"""What an object leads to: the parts of containers, objects, functions, classes and modules, by path.

Breadth first, each object once, as deep and as far as ``LIMIT``: what contains comes before what it contains.
The globals of a file are not seen."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import enum
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import nn

LIMIT = 100_000  # objects; what lies beyond is compared by its kind and length alone
EXACT = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
REGISTERED = ("_parameters", "_buffers", "_modules")
# A copy of an LSTM finds these out of date, and makes them anew; omegaconf fills its cache by reading.
INTERNAL = {*REGISTERED, "_flat_weight_refs", "_flags_cache"}
OF_EVERY = frozenset(vars(nn.Module()))  # attributes of every module
OPAQUE = ("torch._", "torch.fx.", "torch.jit.", "torch.distributed.")
# What their objects hold moves by itself, or is no data: caches of loggers, waiting threads, open files.
MACHINERY = frozenset(
    "builtins logging threading concurrent asyncio queue io _io functools importlib typing weakref "
    "_weakref abc contextlib socket subprocess pathlib os".split()
)
DICTS = (dict, types.MappingProxyType)


def walk(
    root: object, *, name: str = "", enters: Callable[[object], bool] = lambda item: True
) -> Iterator[tuple[str, object, str | None]]:
    """(path, item, the path at which it was met before, or None) of all that ``root`` leads to.

    What contains comes before what it contains. ``enters``: whether an item is looked into."""
    seen: dict[int, tuple[str, object]] = {}  # with the item: an id is one only while it lives
    waiting: collections.deque[tuple[str, object]] = collections.deque([(name, root)])
    while waiting:
        path, item = waiting.popleft()
        before = seen.get(id(item), (None, item))[0]
        yield path, item, before
        if before is not None or is_plain(item):
            continue
        seen[id(item)] = path, item
        if len(seen) < LIMIT and enters(item):
            at = path if len(path) < 1000 else f"#{len(seen)}"  # far down a chain of objects
            waiting.extend((at + step if step[0] in ".[" else step, part) for step, part in _parts(item))


def is_plain(item: object) -> bool:
    """Whether a value cannot change, and holds nothing that could."""
    if isinstance(item, (*EXACT, float, complex, enum.Enum, numpy.generic)):
        return True
    if isinstance(item, type):
        return is_foreign(item)
    return type(item) in (tuple, torch.Size, frozenset) and all(map(is_plain, item))  # type: ignore[arg-type]


def _parts(item: object) -> Iterator[tuple[str, object]]:
    """(".name", "[key]", or a name of its own; part) of everything that an item holds."""
    if is_plain(item) or isinstance(item, torch.Tensor | weakref.ref):
        return
    if isinstance(item, DICTS):
        for number, (key, value) in enumerate(list(item.items())):
            yield f"[{repr(key)[:40]}]" if is_plain(key) else f"[{type(key).__name__} {number}]", value
    elif isinstance(item, list | tuple | collections.deque):
        yield from ((f"[{i}]", part) for i, part in enumerate(list(item)))
    elif isinstance(item, set | frozenset):
        yield from ((f"[{type(part).__name__} {i}]", part) for i, part in enumerate(list(item)))
    elif isinstance(item, types.MethodType | types.BuiltinMethodType):
        owner = item.__self__
        if not isinstance(owner, types.ModuleType | type) and not type(owner).__module__.startswith("torch."):
            yield ".__self__", owner
    elif isinstance(item, contextvars.ContextVar):
        with contextlib.suppress(LookupError):  # never set
            yield ".get()", item.get()
    elif isinstance(item, functools.partial):
        yield from ((".func", item.func), (".args", item.args), (".keywords", item.keywords))
    if isinstance(item, types.FunctionType):
        yield from _inside_function(item)
    elif isinstance(item, type):
        inside = {n: getattr(part, "__func__", part) for n, part in vars(item).items()}
        functions = {n: part for n, part in inside.items() if isinstance(part, types.FunctionType)}
        yield from ((f".{name}", part) for name, part in (data_of(item) | functions).items())
    elif isinstance(item, nn.Module):
        for registered in REGISTERED:
            yield from ((f".{name}", part) for name, part in vars(item)[registered].items())
    held = attributes_of(item)
    if held is not None:
        empty = OF_EVERY if isinstance(item, nn.Module) else ()  # a dozen dicts of hooks in every module
        yield from (
            (f".{name}", part)
            for name, part in held.items()
            if name not in INTERNAL and not (name in empty and part in ({}, set()))
        )
        yield from ((kind.__name__, kind) for kind in written_kinds(item))


def written_kinds(item: object) -> list[type]:
    """The classes of an object that neither Python nor torch brings."""
    return [kind for kind in type(item).__mro__ if not is_foreign(kind)]


def data_of(kind: type) -> dict[str, object]:
    """The attributes of a class that are data: neither functions nor what Python keeps there itself."""
    return {
        name: part
        for name, part in vars(kind).items()
        if not name.startswith(("__", "_abc_")) and not hasattr(type(part), "__get__")
    }


def _inside_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    if is_foreign(function):
        return
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        if cell != types.CellType():  # not assigned yet
            yield f".{name}", cell.cell_contents
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__


def attributes_of(item: object) -> dict[str, object] | None:
    """What an object holds under names, None where it is not to be looked into."""
    if isinstance(item, type | types.FunctionType) or (is_foreign(type(item)) and not _is_open(item)):
        return None
    held = dict(getattr(item, "__dict__", {}))
    for kind in type(item).__mro__:
        slots: Any = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(item, name):
                held[name] = getattr(item, name)
    return held


def _is_open(item: object) -> bool:
    """Whether an object of torch's or of Python's own may hold what a model goes on from."""
    home = type(item).__module__
    if isinstance(item, nn.Module) or (home.startswith("torch.") and not home.startswith(OPAQUE)):
        return True
    return home.partition(".")[0] not in MACHINERY | {"torch"} and hasattr(item, "__dict__")


def is_foreign(kind: type | types.FunctionType) -> bool:
    """Whether it comes with Python or torch."""
    root = (kind.__module__ or "").partition(".")[0]
    return root == "torch" or (root != "__main__" and root in sys.stdlib_module_names)
