"""The clip by a norm over the gradients of all stages: the bits of ``clip_grad_norm_`` over the whole model.

torch puts the norms together by device and dtype in an order of its own, and promotes them where they differ.
So torch is asked for that order, with empty tensors in the place of gradients that other ranks hold."""

import functools
from collections.abc import Mapping, Sequence

import torch

from ...stages.device import is_gpu
from ...stages.torch_private import foreach_norm, group_tensors
from ..distributed.process_group import World

Norms = Mapping[str, tuple[float, float]]

DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


def norm_together(
    world: World, found: Norms, *, owner: Mapping[str, int], device: torch.device
) -> torch.Tensor | None:
    """The norm of the gradients of all ranks on ``device``, None where there is none; collective.

    Args:    found: ``norms`` of this process.
             owner: the rank of every parameter of the model, in the model's own order."""
    mine = [number for name in owner for number in found.get(name, (0.0, 0.0))]
    rows = world.all_gather(mine, at="the norm of all gradients")
    pairs = (rows[rank][2 * place : 2 * place + 2] for place, rank in enumerate(owner.values()))
    return total_norm([pair for pair in pairs if pair[0]], device=device)


def total_norm(found: Sequence[Sequence[float]], *, device: torch.device) -> torch.Tensor | None:
    """The norm of gradients of which ``norms`` says these, in the model's own order; None for none."""
    if not found:
        return None
    dtypes = [DTYPES[int(kind) - 1] for kind, _ in found]
    stand_ins = [torch.empty(0, dtype=dtype) for dtype in dtypes]
    alike = group_tensors([stand_ins], with_indices=True).values()  # type: ignore[list-item]
    promoted = functools.reduce(torch.promote_types, {dtype.to_real() for dtype in dtypes})
    ordered = [found[i][1] for _, places in alike for i in places]
    return torch.linalg.vector_norm(torch.tensor(ordered, dtype=promoted, device=device))


def norms(gradients: Mapping[str, torch.Tensor]) -> dict[str, tuple[float, float]]:
    """The dtype of every gradient, counted from 1, and its norm; a GPU is asked once for all."""
    found: dict[str, tuple[float, float]] = {}
    queued: dict[tuple[torch.device, torch.dtype], dict[str, torch.Tensor]] = {}
    for name, gradient in gradients.items():
        if is_gpu(gradient.device):
            queued.setdefault((gradient.device, gradient.dtype), {})[name] = gradient
        else:
            found[name] = 1.0 + DTYPES.index(gradient.dtype), float(torch.linalg.vector_norm(gradient))
    for (_, dtype), alike in queued.items():
        each = foreach_norm(list(alike.values()))
        numbers = torch.stack([norm.double() for norm in each]).tolist()
        found |= {
            name: (1.0 + DTYPES.index(dtype), number) for name, number in zip(alike, numbers, strict=True)
        }
    return found
