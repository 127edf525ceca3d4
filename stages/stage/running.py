"""One micro-batch of a stage between its forward and the end of its backward.

What was sent is held as edges of the graph, not as tensors: only autograd knows who still needs those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.autograd.graph import GradientEdge

from .backward import Split
from .guard import Watch
from .sides import Root


class Running:
    """``roots`` of what it sent, ``gradients`` of what it received, by value; its ``loss``; its ``watch``.

    ``asks``: which received values asked for a gradient when traced; none comes to one frozen since."""

    __slots__ = ("asks", "gradients", "loss", "roots", "split", "watch")

    def __init__(self, asks: Sequence[int]) -> None:
        """Its forward begins."""
        self.asks = asks
        self.roots: dict[int, GradientEdge] = {}
        self.gradients: dict[int, torch.Tensor] = {}
        self.loss: torch.Tensor | None = None
        self.split: Split | None = None  # between the halves of its backward
        self.watch: Watch | None = None  # with a guard

    def begins(self, gradients: Mapping[int, torch.Tensor | None]) -> list[Root]:
        """Where its backward begins: at its loss, and at what it sent of which a gradient came back."""
        found: list[Root] = [] if self.loss is None else [(self.loss, None)]
        return found + [(edge, g) for n, edge in self.roots.items() if (g := gradients[n]) is not None]

    def ends(self) -> dict[int, torch.Tensor | None]:
        """The gradients of what it received."""
        return {number: self.gradients.pop(number, None) for number in self.asks}
