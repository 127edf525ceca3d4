"""Random draws of a run: the order of an epoch, and the first states of a batch's generators."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...stages.seeds import TURN


def order_of(num_samples: int, *, seed: int, epoch: int) -> Tensor:
    """Return a permutation from a generator of its own."""
    own = torch.Generator().manual_seed(_number(f"{seed}/{epoch}/samples"))
    return torch.randperm(num_samples, generator=own)


@contextlib.contextmanager
def drawing(split: str, epoch: int, number: int, *, seed: int) -> Iterator[None]:
    """Begin the generators that everybody draws from at a number of this batch, and leave them as they were.

    One thread computes, as in a process that loads ahead: another number of them may add in another order."""
    number = _number(f"{seed}/{epoch}/{split} {number}")
    threads = torch.get_num_threads()
    with TURN:
        before = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
        torch.default_generator.manual_seed(number)
        random.seed(number)
        np.random.seed(number % 2**32)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.default_generator.set_state(before[0])
            random.setstate(before[1])
            np.random.set_state(before[2])


def generators(own: Iterable[Any] = ()) -> tuple[object, ...]:
    """The states of the generators that everybody draws from, and of ``own_generators``."""
    _, keys, *rest = np.random.get_state(legacy=True)
    everybodys = torch.default_generator.get_state().numpy().tobytes(), random.getstate(), repr(rest)
    return *everybodys, keys.tobytes(), *(_KINDS[type(one)](one) for one in own)  # pyright: ignore[reportAttributeAccessIssue]


def own_generators(owner: Any) -> list[Any]:
    """Return the generators that hang on ``owner``, a data set: on itself, its transforms, what it wraps."""
    found, seen, level = [], {id(owner)}, [owner]
    for _ in range(_DEEPEST):
        inner = [one for each in level for one in _held(each) if id(one) not in seen]
        level = list({id(one): one for one in inner}.values())[:_MOST]
        seen |= set(map(id, level))
        found += [one for one in level if type(one) in _KINDS]
    return found


def _held(owner: Any) -> Iterable[Any]:
    """Yield the objects of ``owner`` that may have a generator; long containers hold samples."""
    if isinstance(owner, Tensor | np.ndarray | type):
        return ()
    if isinstance(owner, list | tuple):
        held: Iterable[Any] = owner if len(owner) <= _LONGEST else ()
    elif isinstance(owner, dict):
        held = owner.values() if len(owner) <= _LONGEST else ()
    else:
        held = getattr(owner, "__dict__", {}).values()
    return [one for one in held if not isinstance(one, str | bytes | int | float | None)]


_DEEPEST, _MOST, _LONGEST = 4, 200, 50
_KINDS: dict[type, Callable[[Any], object]] = {
    torch.Generator: lambda one: one.get_state().numpy().tobytes(),
    random.Random: lambda one: one.getstate(),
    np.random.Generator: lambda one: repr(one.bit_generator.state),
    np.random.RandomState: lambda one: repr(one.get_state(legacy=False)),
}
"""Generators that people own, and what tells whether one has moved."""


def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
