"""One micro-batch of a stage between its forward and the end of its backward.

What was sent is held as edges of the graph, not as tensors: only autograd knows who still needs those.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.autograd.graph import GradientEdge

from .backward import Split
from .sides import Root


class Running:
    """``roots`` of what it sent, ``slots`` for the gradients of what it received, by value; its ``loss``."""

    __slots__ = ("loss", "roots", "slots", "split")

    def __init__(self) -> None:
        """Its forward begins."""
        self.roots: dict[int, GradientEdge] = {}
        self.slots: dict[int, dict[str, torch.Tensor]] = {}
        self.loss: torch.Tensor | None = None
        self.split: Split | None = None  # between the halves of its backward

    def begins(self, gradients: Mapping[int, torch.Tensor | None]) -> list[Root]:
        """Where its backward begins: at its loss, and at what it sent of which a gradient came back."""
        found: list[Root] = [] if self.loss is None else [(self.loss, None)]
        found += [(edge, gradients[number]) for number, edge in self.roots.items()]
        return [root for root in found if root[0] is self.loss or root[1] is not None]

    def ends(self) -> dict[int, torch.Tensor | None]:
        """The gradients of what it received."""
        return {number: slot.pop("gradient", None) for number, slot in self.slots.items()}
