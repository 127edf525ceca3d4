"""A model without the values of its parameters, from which it is recorded again for inputs of other shapes.

A rank keeps its own layers only, so nobody has the whole model once it trains. A record does not hang on the
values of large parameters: they are made up, the same on all ranks. Small ones and buffers keep the values
that they had."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .capture.call_spec import Call, Constant
from .meta_model import has_meta, on_meta
from .model_checks import Leaf
from .tracer import LayerGraph, trace

KEPT = 1024  # elements of a parameter that keeps its values: a gate, a bias, what forward may look at


class Skeleton:
    """See the module."""

    def __init__(self, model: nn.Module) -> None:
        """Copy ``model`` without the memory of its parameters."""
        self._has_values = not has_meta(model)
        self._devices = {name: parameter.device for name, parameter in model.named_parameters()}
        held = [p for p in model.parameters() if self._has_values and _is_made_up(p)]
        without: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in held}
        self._model = copy.deepcopy(model, without) if self._has_values else on_meta(model)

    def graph(
        self,
        call: Call,
        inputs: Sequence[Tensor],
        example: Sequence[Tensor],
        *,
        autocast: torch.dtype | None,
        leaves: Iterable[Leaf],
    ) -> LayerGraph:
        """Record the model for ``inputs``, whose shapes alone count.

        Args:    example: inputs of another record; their values are taken.
        Raises:  PlanError: what ``trace`` refuses."""
        tensors = [_like(one, known) for one, known in zip(inputs, example, strict=True)]
        given: list[Any] = [Constant(t) if w else t for t, w in zip(tensors, call.whole, strict=True)]
        args, kwargs = call.arguments(given)
        return trace(self._whole(), args or kwargs, autocast=autocast, leaves=leaves)

    def _whole(self) -> nn.Module:
        """A copy in which parameters have values."""
        made: dict[int, Any] = {}
        generator = torch.Generator().manual_seed(0)
        for name, parameter in self._model.named_parameters() if self._has_values else ():
            if parameter.is_meta:
                values = _made_up(parameter, generator).to(self._devices[name])
                made[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
        return copy.deepcopy(self._model, made)


def _is_made_up(parameter: Tensor) -> bool:
    numbers = parameter.is_floating_point() or parameter.is_complex()
    return type(parameter) is nn.Parameter and numbers and parameter.numel() > KEPT


def _made_up(like: Tensor, generator: torch.Generator) -> Tensor:
    """Values of about the size that layers begin with."""
    wide = math.prod(like.shape[1:]) if like.dim() > 1 else 1
    kind = like.dtype if like.is_complex() else torch.float32
    values = torch.randn(like.shape, dtype=kind, generator=generator, device=generator.device)
    values.div_(math.sqrt(max(1, wide)))
    out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=generator.device)
    return out.copy_(values + (like.dim() == 1))


def _like(one: Tensor, known: Tensor) -> Tensor:
    """A tensor of the shape, strides and dtype of ``one`` with values of ``known``, over and over."""
    found = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=known.device).zero_()
    if known.numel():
        places = torch.arange(found.numel(), device=known.device) % known.numel()
        found.copy_(known.flatten()[places].view(one.shape))
    return found
