"""Random draws of a run: the order of an epoch, and the first states of a batch's generators."""

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...stages.seeds import python_states, seeded


def order_of(num_samples: int, *, seed: int, epoch: int) -> Tensor:
    """Return a permutation from a generator of its own."""
    own = torch.Generator().manual_seed(_number(f"{seed}/{epoch}/samples"))
    return torch.randperm(num_samples, generator=own)


@contextlib.contextmanager
def drawing(split: str, epoch: int, number: int, *, seed: int) -> Iterator[None]:
    """Begin the generators that everybody draws from at a number of this batch, and leave them as they were.

    One thread computes, as in a process that loads ahead: more may add in another order."""
    number = _number(f"{seed}/{epoch}/{split} {number}")
    threads = torch.get_num_threads()
    with seeded(number, [torch.default_generator]):
        before = random.getstate(), np.random.get_state()
        random.seed(number)
        np.random.seed(number % 2**32)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            random.setstate(before[0])
            np.random.set_state(before[1])


def generators(own: Iterable[Any]) -> tuple[object, ...]:
    """Return the states of the generators that everybody draws from, and of ``own_generators``."""
    states = (_KINDS[type(one)](one) for one in (torch.default_generator, *own))
    return *states, *python_states()


def own_generators(owner: Any) -> list[Any]:
    """Return the generators that hang on ``owner``, a data set: on itself, its transforms, what it wraps."""
    own, seen, level = [], {id(owner)}, [owner]
    for _ in range(_DEEPEST):
        inner = {id(one): one for each in level for one in _held(each) if id(one) not in seen}
        level = list(inner.values())[:_MOST]
        seen |= set(map(id, level))
        own += [one for one in level if type(one) in _KINDS]
    return own


def _held(owner: Any) -> Iterable[Any]:
    """Return the objects of ``owner`` that may have a generator; long containers hold samples."""
    if isinstance(owner, Tensor | np.ndarray | type):
        return ()
    if isinstance(owner, list | tuple | dict):
        values = owner.values() if isinstance(owner, dict) else owner
        held = values if len(owner) <= _LONGEST else ()
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
