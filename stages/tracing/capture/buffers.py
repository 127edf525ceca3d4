"""Buffers that a forward writes to: read as copies where autograd may keep them, replaced ones written back.

A pipeline runs several forwards before the first backward, and what a layer kept of a buffer must not change
between. A forward that gives a module another tensor for a buffer becomes one that writes into the one it
has."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..unseen import Contents


class Buffers:
    """The registered buffers of ``model``, of which its forward changes those that are ``written``."""

    def __init__(self, model: nn.Module, written: Collection[str]) -> None:
        self.held = dict(model.named_buffers(remove_duplicate=False))
        self.written = {id(self.held[name]) for name in written if name in self.held}

    def among(self, given: Any) -> list[tuple[torch.Tensor, Contents]]:
        """Written buffers among the arguments of a call, each with what it held before it."""
        if not self.written or not torch.is_grad_enabled():
            return []
        return [(t, Contents([t])) for t in tree_leaves(given) if id(t) in self.written]

    def replaced(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, old and new tensor of those that ``model`` has no more."""
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if name in self.held and buffer is not self.held[name]:
                yield name, self.held[name], buffer


def only_read(buffer: torch.Tensor, before: Contents, result: Any) -> bool:
    """Whether a call left ``buffer`` as it was, gave no view of it, and may keep it for its backward."""
    made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    memory = buffer.untyped_storage()._cdata
    viewed = any(t.layout is torch.strided and t.untyped_storage()._cdata == memory for t in made)
    return not viewed and any(t.requires_grad for t in made) and not before.changed()
