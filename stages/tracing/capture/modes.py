"""Grad mode and autocast at one place of a run, so that a node runs again as it ran."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ...autocast import autocast, autocast_state


class Modes(NamedTuple):
    """Whether gradients are recorded, and what autocast does on devices of a ``kind``."""

    grad: bool
    autocast: bool
    dtype: torch.dtype
    cache: bool
    kind: str

    @classmethod
    def now(cls, kind: str) -> Modes:
        """Those of this moment."""
        state, cache = autocast_state(torch.device(kind)), torch.is_autocast_cache_enabled()
        return cls(torch.is_grad_enabled(), *state, cache, kind)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The block in which they hold."""
        now = Modes.now(self.kind)
        cast = contextlib.nullcontext()
        if now[1:] != self[1:]:
            device = torch.device(self.kind)
            cast = autocast(self.dtype, enabled=self.autocast, cache=self.cache, device=device)
        with torch.set_grad_enabled(self.grad), cast:
            yield
