"""Grad mode and autocast at one place of a run, so that a node runs again as it ran."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch


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
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.is_autocast_cache_enabled(),
        )

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The block in which they hold."""
        now = Modes.now()
        cast = contextlib.nullcontext()
        if now[1:] != self[1:]:
            cast = torch.autocast("cpu", self.dtype, enabled=self.autocast, cache_enabled=self.cache)
        with torch.set_grad_enabled(self.grad), cast:
            yield
