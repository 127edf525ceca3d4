"""Random layers are seeded one by one, so that a run does not depend on how the model is cut."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def layer_seed(seed: int, step: int, micro_batch: int, name: str) -> int:
    """What the generator is seeded with before the random layer ``name`` (steps, micro-batches from 0)."""
    text = f"{seed}/{step}/{micro_batch}/{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a random layer from ``seed`` and put the generator's state back afterwards."""
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(before)
