"""The clip by a norm over the gradients of all stages: the bits of ``clip_grad_norm_`` over the whole model.

torch puts the norms together by device and dtype in an order of its own, and promotes them where they differ.
So torch is asked for that order, with empty tensors in the place of gradients that other ranks hold."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from ..ranks.world import World

DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


def clip_together(
    world: World,
    parameters: Mapping[str, torch.nn.Parameter],
    largest: float,
    *,
    owner: Mapping[str, int],
) -> None:
    """Scale the gradients of ``parameters`` in place; collective.

    Args:    parameters: those of this process by name.
             largest: the L2 norm that the gradients of all ranks may have together.
             owner: the rank of every parameter of the model, in the model's own order."""
    told = world.all_gather([number for name in owner for number in _norm(parameters.get(name))])
    found = [
        (DTYPES[int(kind) - 1], norm)
        for place, rank in enumerate(owner.values())
        for kind, norm in [told[rank][2 * place : 2 * place + 2]]
        if kind
    ]
    if found:
        stand_ins = [torch.empty(0, dtype=dtype) for dtype, _ in found]
        alike = _group_tensors_by_device_and_dtype([stand_ins], with_indices=True).values()  # type: ignore[list-item]
        promoted = functools.reduce(torch.promote_types, {dtype.to_real() for dtype, _ in found})
        norms = torch.tensor([found[i][1] for _, places in alike for i in places], dtype=promoted)
        torch.nn.utils.clip_grads_with_norm_(
            list(parameters.values()), largest, torch.linalg.vector_norm(norms)
        )


def _norm(parameter: torch.nn.Parameter | None) -> tuple[float, float]:
    """Which dtype the gradient has, counted from 1, and its norm; (0, 0) without a gradient."""
    if parameter is None or parameter.grad is None:
        return 0.0, 0.0
    return 1.0 + DTYPES.index(parameter.grad.dtype), float(torch.linalg.vector_norm(parameter.grad))
