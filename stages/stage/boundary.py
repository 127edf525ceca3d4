"""Entry of a received tensor into the graph of a stage."""

from __future__ import annotations

from typing import Any

import torch


class Receive(torch.autograd.Function):
    """Brings a received tensor into the graph as neither leaf nor view; its gradient is caught raw.

    A leaf would lay its gradient out anew, refuse to be written in place, and have its casts cached.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        """(anchor that asks for a gradient, tensor, gradients, number) -> another tensor over its memory."""
        _, tensor, ctx.gradients, ctx.number = args
        ctx.set_materialize_grads(False)
        return tensor.data  # over the same memory, and no view for autograd

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None, None]:
        """Keep the gradient among ``gradients``, if there is one, and end the stage's backward here."""
        if gradients[0] is not None:
            ctx.gradients[ctx.number] = gradients[0]
        return None, None, None, None
