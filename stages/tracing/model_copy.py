"""A copy of a model to trace and to run: every weight is moved a little, and put back.

What tracing computed from a weight and baked in shows when the weight moves. A copied parameter has memory of
its own, whatever shared it in the model."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from ...compression.errors import PlanError
from .aliases import memory_of
from .contents import held_tensors, tensors
from .unsupported import refuse_resized


def on_meta(model: nn.Module) -> nn.Module:
    """A copy of ``model`` whose tensors have no memory, registered or not."""
    known: dict[int, torch.Tensor] = {}
    for tensor in held_tensors(model):
        if type(tensor) in (nn.Parameter, torch.Tensor):
            bare = tensor.detach().to("meta")
            known[id(tensor)] = (
                nn.Parameter(bare, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else bare
            )
    return copy.deepcopy(model, known).to("meta")  # type: ignore[arg-type]


def move(weight: torch.Tensor) -> None:
    """Move a weight a little: what was computed from it and baked in shows."""
    if weight.is_floating_point() and weight.itemsize > 1:  # torch does not compute with float8
        memory_of(weight).mul_(1.0625).add_(0.0078125)


class Copied:
    """``root`` is the copy, as it will train: modules keep their own flags, unless all stand in eval mode.

    ``clean``: a run leaves nothing behind in it that ``restore`` does not put back.
    ``apart``: paths of tensors that lie in the memory of a trained parameter and are not registered: they
    change with every update, so they are moved like a weight."""

    def __init__(self, model: nn.Module, apart: Sequence[str]) -> None:
        try:
            self.root = copy.deepcopy(model)
        except Exception as error:
            raise PlanError(f"a model is traced on a copy, and this one cannot be copied: {error}") from error
        if not self.root.training:
            self.root.train()
        self.clean = True
        ours, theirs = (tensors(root) if apart else {} for root in (self.root, model))
        named = (*model.named_parameters(), *model.named_buffers())
        copies = (*self.root.parameters(), *self.root.buffers())
        self.pairs = [
            *((name, ours, original) for ours, (name, original) in zip(copies, named, strict=True)),
            *((name, ours[name], theirs[name]) for name in apart),
        ]

    def anew(self, *, shifted: bool = False) -> nn.Module:
        """A copy that has not run: this one, put back; or a copy of it, where a run leaves traces."""
        self.restore()
        if shifted:
            self.shift()
        return self.root if self.clean else copy.deepcopy(self.root)

    def shift(self) -> None:
        """Move every weight and buffer a little."""
        with torch.no_grad():
            for _, ours, _ in self.pairs:
                move(ours)

    def restore(self) -> None:
        """Give the copy the model's tensors back after a run, and no gradients."""
        with torch.no_grad():
            for name, ours, original in self.pairs:
                refuse_resized(name, ours, original)
                same = ours.stride() == original.stride()
                (memory_of(ours) if same else ours).copy_(memory_of(original) if same else original)
        self.root.zero_grad()
