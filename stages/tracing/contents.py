"""What a model holds, by path: plain values, containers, objects, tensors, whatever module they hang on.

A forward may change any of it, and a person may between two steps; stages run what was traced, on other
copies and on other ranks, so a change is found by comparing this before and after."""

from __future__ import annotations

import collections
import functools
import itertools
import random
import types
import weakref
import zlib
from collections.abc import Callable, Collection
from typing import Any

import numpy
import torch
from torch import nn

from .reach import DICTS, EXACT, OF_EVERY, attributes_of, is_plain, walk

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
    registered: set[int] = set()
    if running and isinstance(root, nn.Module):
        frozen = (p for p in root.parameters() if not p.requires_grad)
        unversioned = {*unversioned, *map(id, root.buffers()), *map(id, frozen)}
        registered = {*unversioned, *map(id, root.parameters())}
    found: Facts = {}
    for path, item, before in walk(root, name=name, enters=enters):
        if isinstance(item, torch.Tensor):  # under every path: tracing adds some
            bits = running and id(item) not in registered
            fact = _tensor(item, version=id(item) not in unversioned, bits=bits)
        elif before is not None:
            fact = type(item), before
        else:
            fact = _fact(item) if enters(item) else (type(item), Same(item))
        found[path.removeprefix(".")] = fact
    return found


def tensors(root: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor that ``root`` leads to: registered ones under their names, others by path."""
    names = {id(t): name for name, t in (*root.named_parameters(), *root.named_buffers())}
    met = ((path, item) for path, item, before in walk(root) if before is None)
    return {
        names.get(id(item), path.removeprefix(".")): item
        for path, item in met
        if isinstance(item, torch.Tensor)
    }


def held_tensors(root: nn.Module) -> list[torch.Tensor]:
    """The tensors that ``root`` leads to; walks only where an attribute could lead to others than
    registered."""
    others = (item for m in root.modules() for name, item in vars(m).items() if name not in OF_EVERY)
    if all(map(is_plain, others)):
        return [*root.parameters(), *root.buffers()]
    return [*tensors(root).values()]


def change(was: Fact | None, now: Fact | None) -> str:
    """Two facts as people read them."""
    told = _shown(was), _shown(now)
    return f"{told[0]}, then {'another' if told[0] == told[1] else told[1]}"


def _shown(fact: Fact | None) -> str:
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
        return type(item), len(item), type(item)(map(_plain, item)) if type(item) is tuple else _bag(item)
    return type(item), item


def _bag(items: Collection[object]) -> tuple[object, ...]:
    return tuple(map(_key, items))


def _key(item: object) -> object:
    """A key of a dict or an element of a set, which stays what it is."""
    return _plain(item) if is_plain(item) else (type(item), id(item))


def _tensor(tensor: torch.Tensor, *, version: bool, bits: bool) -> Fact:
    counted = version and not tensor.is_inference()
    written = tensor._version if counted else None
    return type(tensor), Same(tensor), written, zlib.crc32(_bytes(tensor)) if bits else None


def _fact(item: object) -> Fact:
    if is_plain(item):
        return _plain(item)
    for kind, state in OWN_STATE.items():
        if isinstance(item, kind):
            return type(item), state(item)
    if isinstance(item, DICTS):
        return type(item), len(item), _bag(item)
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
    return (type(item),) if attributes_of(item) is not None else (type(item), Same(item))


def _buffer(item: object) -> int | None:
    """What stands for the bytes of an array, of a value of ctypes and of all that hands out its memory."""
    try:
        with memoryview(item) as memory:  # type: ignore[arg-type]
            return zlib.crc32(memory.tobytes())
    except (TypeError, ValueError, BufferError):
        return None


def _bytes(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return b""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()
