"""Does a trace compute what the model computes? Outputs, gradients and buffers, compared bit for bit.

torch.fx loses things without a word; one comparison before training costs seconds, a wrong model costs
weeks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ..compression.errors import PlanError


def fresh(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copies in memory of their own: views may be misaligned, and a layer may write to its input."""
    return tuple(x.detach().clone() for x in inputs)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and every bit agree (torch.equal takes -0.0 for 0.0 and no NaN for itself)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for t in (a, b))
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def refuse_lost_buffers(model: nn.Module, traced: nn.Module) -> None:
    """Refuse a forward that writes buffers outside its layers: torch.fx runs that once and loses it."""
    after = dict(traced.named_buffers())
    for name, buffer in model.named_buffers():
        if name not in after or not same_bits(buffer, after[name]):
            raise PlanError(
                f"torch.fx loses what forward writes to the buffer {name}; move that update into a module of "
                "its own "
                "that torch.fx takes as a leaf"
            )


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor))


def observe(
    run: Callable[..., Any], model: nn.Module, inputs: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor | None]:
    """Outputs, gradients and buffers of one forward and backward from a fixed random state."""
    torch.manual_seed(0)
    model.zero_grad()
    outputs = list(_tensors(run(*fresh(inputs))))
    seen: dict[str, torch.Tensor | None] = {f"output {i}": t.detach().clone() for i, t in enumerate(outputs)}
    roots = [t for t in outputs if t.requires_grad]
    weights = [torch.linspace(-1, 1, t.numel(), dtype=torch.float64).reshape(t.shape).to(t) for t in roots]
    if roots:
        torch.autograd.backward(roots, weights)
    seen |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    seen |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    return seen


def refuse_difference(
    expected: Mapping[str, torch.Tensor | None], found: Mapping[str, torch.Tensor | None], *, mode: str
) -> None:
    """Raise PlanError unless the trace has the eager model's outputs, gradients and buffers."""
    for name, tensor in expected.items():
        other = found.get(name)
        if (tensor is None) != (other is None) or (
            tensor is not None and other is not None and not same_bits(tensor, other)
        ):
            raise PlanError(
                f"the torch.fx trace does not compute what the model computes in {mode} mode ({name} "
                "differs): no_grad and "
                "autocast blocks, tensors made in forward and branches on values are lost; "
                "move them into a module of their own or wrap the function with torch.fx.wrap"
            )
