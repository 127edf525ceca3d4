"""Random layers are seeded one by one, so that a run does not depend on how the model is cut."""

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import numpy
import torch

from .device import CPU, device_of, is_gpu
from .meta_watch import watching
from .torch_private import tree_leaves

TURN = threading.RLock()
"""Held by whoever seeds and draws from generators of the process, or exchanges methods of torch, which ranks
as threads share; nobody who holds it waits for another rank. It is no state."""


def layer_seed(seed: int, step: int, micro_batch: int, name: str) -> int:
    """Seed of the generator before the random layer ``name`` (steps, micro-batches from 0)."""
    text = f"{seed}/{step}/{micro_batch}/{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def generators_of(tensors: Iterable[torch.Tensor]) -> tuple[torch.Generator, ...]:
    """Generators that random layers draw from where these tensors are: always the CPU's, a ``MetaWatch``."""
    places = {CPU: None} | {t.device: None for t in tensors if is_gpu(t.device)}
    found: dict[int, Any] = {id(g): g for place in places for g in device_of(place).generators}
    watch = watching()
    return (*found.values(), *(() if watch is None else (cast("torch.Generator", watch),)))


def states_of(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    """Their states, for ``drew``."""
    return [generator.get_state() for generator in generators]


def python_states() -> tuple[object, ...]:
    """The states of Python's own generator and of NumPy's, to be compared."""
    parts = tree_leaves(numpy.random.get_state(legacy=False))
    return random.getstate(), *(x.tobytes() if isinstance(x, numpy.ndarray) else x for x in parts)


def drew(generators: Sequence[torch.Generator], before: Sequence[torch.Tensor]) -> bool:
    """Return whether somebody has drawn from one of them since ``before``."""
    return not all(map(torch.equal, states_of(generators), before))


@contextlib.contextmanager
def seeded(seed: int | None, generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Run a random layer from ``seed`` (None: from where they are); put the states back afterwards."""
    with TURN:
        before = states_of(generators)
        if seed is not None:
            for generator in generators:
                generator.manual_seed(seed)
        try:
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)
