"""The loss of a micro-batch, and what must not be hidden in it.

It is where the backward of the last stage begins, and it may reach the model through its outputs only: a
parameter that it reads beside them lives on another stage, and its gradient would be lost without a word."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves

from ...compression.errors import StageError
from ...stages.device import CPU
from ...stages.tracing.layers import casting

Loss = Callable[[Any, Any], torch.Tensor]


def mean_loss(loss: Loss, outputs: Any, targets: Any, *, autocast: torch.dtype | None) -> torch.Tensor:
    """The loss as a 0-dim tensor that backward can begin from; raises StageError if it is none."""
    try:
        with casting(autocast, _place(outputs, autocast)):
            found = loss(outputs, targets)
    except StageError:
        raise
    except Exception as error:
        raise StageError(f"the loss: {type(error).__name__}: {error}") from error
    if not isinstance(found, torch.Tensor) or found.dim():
        shape = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
        raise StageError(
            f"the loss is one number, a mean over its micro-batch, as a 0-dim tensor; found {shape}"
        )
    if not found.is_floating_point():
        raise StageError(f"the loss is a floating-point number, found one of {found.dtype}; convert it")
    if not found.requires_grad:
        raise StageError("the loss depends on trained parameters, found one that was detached or has none")
    return found


def total_loss(losses: Mapping[int, torch.Tensor], shares: Mapping[int, float], *, mean: bool) -> float:
    """The sum of share x loss over micro-batches, ascending, in the loss's dtype, at least float32.

    Args:    mean: divide by the sum of the shares, as those that finished in a step of a stream need not be
             a batch. No number where none did."""
    if not losses:
        return math.nan
    some = next(iter(losses.values()))
    dtype = torch.promote_types(some.dtype, torch.float32)
    total = torch.zeros((), dtype=dtype, device=some.device)  # summed where they are: a GPU is asked once
    for index, loss in losses.items():
        total += (loss if loss.dtype is dtype else loss.to(dtype)) * shares[index]
    return float(total) / (sum(shares.values()) if mean else 1)


def _place(outputs: Any, autocast: torch.dtype | None) -> torch.device:
    """Where a loss is computed; only a cast asks."""
    return CPU if autocast is None else next((t.device for t in _tensors(outputs)), CPU)


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    """The tensors of what the model returns, in the fields of dataclasses too."""
    for leaf in tree_leaves(outputs):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])


def check_loss_uses_outputs_only(loss: torch.Tensor, outputs: Any, parameters: Container[object]) -> None:
    """Raise StageError if ``loss`` reaches one of ``parameters`` beside the ``outputs``."""
    leaves = [t for t in _tensors(outputs) if t.requires_grad]
    seen = {get_gradient_edge(t).node for t in leaves}
    ahead = [get_gradient_edge(loss).node]
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        if getattr(node, "variable", None) in parameters:
            raise StageError(
                "the loss reads a parameter of the model, which may be on another stage; return it from "
                "forward"
            )
        ahead += [following for following, _ in node.next_functions if following is not None]
