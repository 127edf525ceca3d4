"""What is drawn for a run: the order of an epoch, and where the generators of a batch begin."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Iterator

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


def _number(name: str) -> int:
    """Return 64 bits that belong to ``name``."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
