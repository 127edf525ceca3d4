"""Grad mode and autocast at one place of a run, so that a node runs again as it ran."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...device import autocast, autocast_state


class Modes(NamedTuple):
    """Whether gradients are recorded, and what autocast does on the CPU."""

    grad: bool
    autocast: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def now(cls) -> Modes:
        """Those of this moment."""
        return cls(
            torch.is_grad_enabled(),
            *autocast_state(),
            torch.is_autocast_cache_enabled(),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The block in which they hold."""
        now = Modes.now()
        cast = contextlib.nullcontext()
        if now[1:] != self[1:]:
            cast = autocast(self.dtype, enabled=self.autocast, cache=self.cache)
        with torch.set_grad_enabled(self.grad), cast:
            yield
