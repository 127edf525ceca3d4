"""Snapshot of a model by path: plain values, containers, objects, tensors, in whatever module.

Stages run what was traced, on other copies and ranks, so a change by a forward or a person is found by
comparing this before and after. Parts are found breadth first, each object once, as far as ``LIMIT``: what
contains comes before what it contains. The globals of a file are not seen."""

import collections
import contextlib
import contextvars
import enum
import functools
import hashlib
import itertools
import random
import re
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy
import torch
from torch import nn

from ..safetensors_io import bytes_of
from ..torch_private import INTERNAL as TORCH_INTERNAL
from ..torch_private import REGISTERED, version_of

LIMIT = 100_000  # objects; what lies beyond is compared by its kind and length alone
EXACT = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
# omegaconf fills a cache by reading; Lightning notes how torch.compile was called
INTERNAL = {*TORCH_INTERNAL, "_flags_cache", "_compile_kwargs"}
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
    """Return whether a value cannot change, and holds nothing that could."""
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
        if not is_foreign(item):
            for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
                if cell != types.CellType():  # not assigned yet
                    yield f".{name}", cell.cell_contents
            yield ".__defaults__", item.__defaults__
            yield ".__kwdefaults__", item.__kwdefaults__
    elif isinstance(item, type):
        inside = {n: getattr(part, "__func__", part) for n, part in vars(item).items()}
        functions = {n: part for n, part in inside.items() if isinstance(part, types.FunctionType)}
        yield from ((f".{name}", part) for name, part in (data_of(item) | functions).items())
    elif isinstance(item, nn.Module):
        for registered in REGISTERED:
            yield from ((f".{name}", part) for name, part in vars(item)[registered].items())
    held = _attributes_of(item)
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


def _attributes_of(item: object) -> dict[str, object] | None:
    """Attributes of an object, None where it is not to be looked into."""
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
    """Return whether an object of torch's or of Python's own may hold what a model goes on from."""
    home = type(item).__module__
    if isinstance(item, nn.Module) or (home.startswith("torch.") and not home.startswith(OPAQUE)):
        return True
    return home.partition(".")[0] not in MACHINERY | {"torch"} and hasattr(item, "__dict__")


def is_foreign(kind: type | types.FunctionType) -> bool:
    """Return whether it comes with Python or torch."""
    root = (kind.__module__ or "").partition(".")[0]
    return root == "torch" or (root != "__main__" and root in sys.stdlib_module_names)


OWN_STATE: dict[type, Callable[[Any], object]] = {
    numpy.ndarray: lambda item: (item.dtype.str, item.shape, zlib.crc32(item.tobytes())),
    torch.Generator: lambda item: zlib.crc32(item.get_state().numpy().tobytes()),
    random.Random: lambda item: item.getstate(),
    numpy.random.Generator: lambda item: repr(item.bit_generator.state),
    numpy.random.RandomState: lambda item: repr(item.get_state()),
    itertools.count: repr,
}

Fact = tuple[Any, ...]  # the type, then what must stay equal
Facts = dict[str, Fact]


class Same:
    """Equal to another of the very same object, as long as that lives; holds it weakly where it can."""

    __slots__ = ("refer",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, item: object) -> None:
        try:
            self.refer: Callable[[], object] = weakref.ref(item)
        except TypeError:
            self.refer = lambda: item

    def __eq__(self, other: object) -> bool:
        mine = self.refer()
        return isinstance(other, Same) and mine is not None and mine is other.refer()


def contents(
    root: object,
    *,
    name: str = "",
    enters: Callable[[object], bool] = lambda item: True,
    unversioned: Collection[int] = (),
    running: bool = False,
) -> Facts:
    """The facts of all that ``root`` leads to, by path; ``enters``: whether an item is looked into.

    ``unversioned``: ids of tensors that may be written to. ``running``: so may buffers and frozen parameters,
    and what is not registered is compared by its elements too: batch_norm, and who writes through ``.data``,
    gives no new version."""
    registered = set[int]()
    if running and isinstance(root, nn.Module):
        frozen = (p for p in root.parameters() if not p.requires_grad)
        unversioned = {*unversioned, *map(id, root.buffers()), *map(id, frozen)}
        registered = {*unversioned, *map(id, root.parameters())}
    found: Facts = {}
    for path, item, before in walk(root, name=name, enters=enters):
        if isinstance(item, torch.Tensor):  # under every path: tracing adds some
            version = None if id(item) in unversioned or item.is_inference() else version_of(item)
            bits = zlib.crc32(_bytes(item)) if running and id(item) not in registered else None
            fact = type(item), Same(item), version, bits
        elif before is not None:
            fact = type(item), before
        else:
            fact = _fact(item) if enters(item) else (type(item), Same(item))
        found[path.removeprefix(".")] = fact
    return found


def digest(root: nn.Module) -> str:
    """A hash of all that ``root`` leads to (of registered tensors the form and who shares them), the same in
    all processes."""
    registered = {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
    lines = []
    for path, item, before in walk(root):
        if isinstance(item, torch.Tensor):
            bits = None if id(item) in registered else (zlib.crc32(_bytes(item)), item.is_meta)
            strides = item.stride() if item.layout is torch.strided else item.layout
            fact: object = before, tuple(item.shape), strides, item.dtype, item.requires_grad, bits
        elif before is not None or is_plain(item):
            fact = before if before is not None else item
        else:
            state = next((state(item) for kind, state in OWN_STATE.items() if isinstance(item, kind)), None)
            fact = type(item).__qualname__, state, _buffer(item)
        lines.append(re.sub(r"\[(\w+) \d+\]", r"[\1]", f"{path} {fact!r}"))  # the order of a set is any
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def tensors(root: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that ``root`` leads to: registered ones under their names, others by path."""
    names = {id(t): name for name, t in (*root.named_parameters(), *root.named_buffers())}
    met = ((path.removeprefix("."), item) for path, item, before in walk(root) if before is None)
    return {names.get(id(item), path): item for path, item in met if isinstance(item, torch.Tensor)}


def held_tensors(root: nn.Module) -> list[torch.Tensor]:
    """The tensors that ``root`` leads to; walks only where an attribute could lead to unregistered ones."""
    others = (item for m in root.modules() for name, item in vars(m).items() if name not in OF_EVERY)
    if all(map(is_plain, others)):
        return [*root.parameters(), *root.buffers()]
    return [*tensors(root).values()]


def change(was: Fact | None, now: Fact | None) -> str:
    """Describe two facts."""
    before, after = describe(was), describe(now)
    return f"{before}, then {'another' if before == after else after}"


def describe(fact: Fact | None) -> str:
    """Return a fact as people read it."""
    if fact is None:
        return "nothing"
    kind, rest = fact[0], fact[1:]
    if issubclass(kind, float | complex):
        return str(rest[0])
    if issubclass(kind, EXACT):
        return repr(rest[0])[:40]
    if issubclass(kind, list | tuple | dict | set | frozenset | collections.deque):
        return f"a {kind.__name__} of {rest[0]}"
    return f"a {kind.__name__}"


def _plain(item: object) -> Fact:
    """Type and value: NaN equals itself here, and 0.0 is not -0.0, nor 1 True."""
    if isinstance(item, float | complex):
        return type(item), repr(item)
    if isinstance(item, numpy.generic):
        return type(item), item.tobytes()
    if isinstance(item, tuple | frozenset):
        return type(item), len(item), tuple(map(_plain if type(item) is tuple else _key, item))
    return type(item), item


def _key(item: object) -> object:
    """A key of a dict or an element of a set, which stays what it is."""
    return _plain(item) if is_plain(item) else (type(item), id(item))


def _fact(item: object) -> Fact:
    if is_plain(item):
        return _plain(item)
    for kind, state in OWN_STATE.items():
        if isinstance(item, kind):
            return type(item), state(item)
    if isinstance(item, DICTS):
        return type(item), len(item), tuple(map(_key, item))
    if isinstance(item, set | frozenset):
        return type(item), len(item), frozenset(map(_key, item))
    if isinstance(item, list | tuple | collections.deque):
        return type(item), len(item)
    if isinstance(item, types.MethodType):
        return type(item), Same(item.__func__)
    if isinstance(item, nn.Module | functools.partial):
        return (type(item),)
    if (held := _buffer(item)) is not None:
        return type(item), held
    return (type(item),) if _attributes_of(item) is not None else (type(item), Same(item))


def _buffer(item: object) -> int | None:
    """Checksum of the bytes of an array, of a value of ctypes and of all that hands out its memory."""
    try:
        with memoryview(item) as memory:  # type: ignore[arg-type]
            return zlib.crc32(memory.tobytes())
    except (TypeError, ValueError, BufferError):
        return None


def _bytes(tensor: torch.Tensor) -> bytes | memoryview:
    return b"" if tensor.layout is not torch.strided or tensor.is_meta else bytes_of(tensor)
