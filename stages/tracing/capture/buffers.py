"""Buffers and frozen parameters that a forward writes to: read as copies where autograd may keep them,
replaced ones written back.

A pipeline runs several forwards before the first backward, and what a layer kept of a buffer must not change
between. A forward that gives a module another tensor for a buffer becomes one that writes into the one it
has."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from ...meta_watch import tensors_in
from ..unseen import Contents


class Buffers:
    """The registered buffers and frozen parameters of ``model``, of which its forward changes those that are
    ``written``."""

    def __init__(self, model: nn.Module, written: Collection[str]) -> None:
        named = model.named_parameters(remove_duplicate=False)
        self.held = {name: p for name, p in named if not p.requires_grad}
        self.held |= dict(model.named_buffers(remove_duplicate=False))
        self.written = {storage_of(tensor) for name, tensor in self.held.items() if name in written}

    def among(self, given: Any) -> list[tuple[torch.Tensor, Contents]]:
        """Written buffers and views of them among the arguments of a call, each with what it held before."""
        if not self.written or not torch.is_grad_enabled():
            return []
        return [(t, Contents([t])) for t in tensors_in(given) if storage_of(t) in self.written]

    def replaced(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Name, old and new tensor of those that ``model`` has no more."""
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if name in self.held and buffer is not self.held[name]:
                yield name, self.held[name], buffer


def storage_of(tensor: torch.Tensor) -> int | None:
    """Return the number of a tensor's memory, which no other memory has; None: it is not one piece."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def only_read(buffer: torch.Tensor, before: Contents, result: Any) -> bool:
    """Whether a call left ``buffer`` as it was, gave no view of it, and may keep it for its backward."""
    made = tensors_in(result)
    viewed = any(storage_of(t) == storage_of(buffer) for t in made)
    return not viewed and any(t.requires_grad for t in made) and not before.changed()
