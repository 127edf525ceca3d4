"""Gradients in one flat buffer for each dtype, each at the offset of its parameter.

A gradient that there is none of is -0.0 throughout, to which adding changes no bit of a sum: 0.0 would make
0.0 of -0.0. So buffers add up whole, whichever parameters got a gradient where.
Source: claim C2 of CN107463448A (the offset of each weight in one buffer)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...compression.errors import StageError
from .optimizers import Named

Buffers = Mapping[torch.dtype, torch.Tensor]


class FlatGradients:
    """The buffers of the gradients of the ``named`` parameters of a stage, on the host.

    ``offsets``: by dtype of each parameter its place among them and its offset in the buffer.

    Args:    pieces: into how many equal parts a buffer must go."""

    def __init__(self, named: Named, *, pieces: int) -> None:
        """Lay them out."""
        self.named, self.offsets, self.sizes = named, dict[torch.dtype, list[tuple[int, int]]](), {}
        for place, (_, parameter) in enumerate(named):
            if parameter.dtype.is_floating_point or parameter.dtype.is_complex:
                start = self.sizes.get(parameter.dtype, 0)
                self.offsets.setdefault(parameter.dtype, []).append((place, start))
                self.sizes[parameter.dtype] = start + parameter.numel()
        self.sizes = {dtype: -(-size // pieces) * pieces for dtype, size in self.sizes.items()}

    def gather(self) -> dict[torch.dtype, torch.Tensor]:
        """Copies of the gradients that there are, of all parameters together.

        Raises: StageError: one is not dense."""
        found = {}
        for dtype, places in self.offsets.items():
            nothing = complex(-0.0, -0.0) if dtype.is_complex else -0.0
            flat = found[dtype] = torch.full((self.sizes[dtype],), nothing, dtype=dtype)
            for place, start in places:
                name, parameter = self.named[place]
                if (gradient := parameter.grad) is None:
                    continue
                if gradient.layout != torch.strided:
                    raise StageError(
                        f"replicas add up dense gradients, and {name} has a sparse one; make its layer with "
                        "sparse=False, or take one rank a stage"
                    )
                flat[start : start + gradient.numel()].view(gradient.shape).copy_(gradient)
        return found

    def has(self) -> torch.Tensor:
        """For each parameter 1 if it has a gradient now, else 0."""
        return torch.tensor([int(p.grad is not None) for _, p in self.named], dtype=torch.uint8)

    def spread(self, flats: Buffers, has: torch.Tensor, *, like: Sequence[torch.Tensor | None]) -> None:
        """Make the gradients those of ``flats``; None where no replica ``has`` one.

        Args:    like: by place what to write them into; None: made anew, in the layout of the parameter."""
        told = has.tolist()
        for dtype, places in self.offsets.items():
            for place, start in places:
                parameter = self.named[place][1]
                if not told[place]:
                    parameter.grad = None
                    continue
                into = like[place]
                gradient = torch.empty_like(parameter, requires_grad=False) if into is None else into
                flat = flats[dtype][start : start + parameter.numel()]
                parameter.grad = gradient.copy_(flat.view(parameter.shape))
