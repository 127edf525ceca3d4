"""Inputs to record with: the example itself, with another number of samples, and with other data."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .call import Call


def fresh(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copies in memory of their own: views may be misaligned, and a layer may write to its input."""
    return tuple(x.detach().clone() for x in inputs)


def resized(call: Call, example: Sequence[torch.Tensor], size: int) -> list[torch.Tensor]:
    """The example with ``size`` samples: its own, and then again; constants stay."""
    samples = call.samples_of(example)
    again = torch.arange(size) % max(1, samples)
    pairs = zip(example, call.whole, strict=True)
    kept = [(x, whole or not x.dim() or len(x) != samples) for x, whole in pairs]
    return [x.clone() if whole else x[again.to(x.device)] for x, whole in kept]


def other_data(call: Call, example: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Inputs of the same shapes, dtypes, strides and range: every element is one from the same place of some
    sample of the example, so that what holds for a place in all samples (positions, padding) goes on to
    hold; a single sample lends from all of its places. Constants stay."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for tensor, whole in zip(example, call.whole, strict=True):
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        if whole or not tensor.numel() or not tensor.dim():
            found.append(made.copy_(tensor))
        elif len(tensor) == 1:
            drawn = torch.randint(tensor.numel(), tensor.shape, generator=generator, device=generator.device)
            found.append(made.copy_(tensor.flatten()[drawn.to(tensor.device)]))
        else:
            drawn = torch.randint(len(tensor), tensor.shape, generator=generator, device=generator.device)
            found.append(made.copy_(tensor.gather(0, drawn.to(tensor.device))))
    return found
