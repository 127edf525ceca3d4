"""How many elements of a tensor are zero: what a codec would leave out."""

from __future__ import annotations

from collections.abc import Callable

import torch


def zero_count(tensor: torch.Tensor) -> Callable[[], float]:
    """What tells the share of its elements that are zero, when it is called: until then no GPU is waited for.

    None are of what torch cannot count, or what has no values."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or not tensor.numel():
        return float
    bits = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # torch counts no float8
    try:
        counted, number = torch.count_nonzero(bits), tensor.numel()
    except RuntimeError:  # nor integers without a sign
        return float
    return lambda: 1 - int(counted) / number
