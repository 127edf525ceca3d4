"""The graph of a plan's model on ranks that were given the plan alone: traced with inputs like its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...compression.errors import PlanError
from ..tracing.capture.call import Call, Constant, Example
from ..tracing.capture.signature import HIGHEST, ArgumentPlace, Signature, form_of
from ..tracing.graph import trace
from ..tracing.layer_graph import LayerGraph
from ..tracing.remembered import recalled
from .plan import Plan


def signature_of(call: Call, tensors: Sequence[torch.Tensor]) -> Signature:
    """How a model was called with these tensors."""
    ranges = [_range(tensor) for tensor in tensors]
    places: Any = [ArgumentPlace(i) for i in range(len(tensors))]
    return Signature(
        form=form_of(call.arguments(places)),
        names=call.names,
        whole=call.whole,
        lowest=tuple(low for low, _ in ranges),
        highest=tuple(high for _, high in ranges),
    )


def graph_of(model: nn.Module, plan: Plan, autocast: torch.dtype | None) -> LayerGraph:
    """The graph of ``model`` as ``plan`` was made for it: traced a moment ago, or now."""
    known = recalled(model)
    if known is not None and _is_meant(known, plan, autocast):
        return known
    return trace(model, example_of(plan), autocast=autocast, leaves=plan.leaves)


def _is_meant(graph: LayerGraph, plan: Plan, autocast: torch.dtype | None) -> bool:
    told = plan.signature
    if told is None:
        return False
    ours = signature_of(graph.train.call, graph.example_inputs)
    shapes = tuple(tuple(x.shape) for x in graph.example_inputs)
    dtypes = tuple(str(x.dtype).removeprefix("torch.") for x in graph.example_inputs)
    asked = (ours.form, ours.names, ours.whole, shapes, dtypes, tuple(graph.train.leaves))
    meant = (told.form, told.names, told.whole, plan.input_shapes, plan.input_dtypes, plan.leaves)
    return (*asked, graph.autocast, graph.fingerprint) == (*meant, autocast, plan.fingerprint)


def example_of(plan: Plan) -> Example:
    """Inputs of the plan's shapes and dtypes: normal numbers, and integers of the range that was seen (0
    where the plan does not know).

    Raises: PlanError: the plan contradicts itself."""
    generator = torch.Generator().manual_seed(0)
    known, number = plan.signature, len(plan.input_shapes)
    if len(plan.input_dtypes) != number or (known and len(known.names) != number):
        raise PlanError("a plan has a name, a shape and a dtype for each input; make the plan anew")
    ranges = list(zip(known.lowest, known.highest, strict=True)) if known else [(0, 0)] * number
    tensors = [
        _made(shape, _dtype(name), bounds, generator)
        for shape, name, bounds in zip(plan.input_shapes, plan.input_dtypes, ranges, strict=True)
    ]
    if known is None:
        return tuple(tensors)
    args, kwargs = known.arguments(
        [Constant(t) if w else t for t, w in zip(tensors, known.whole, strict=True)]
    )
    return args or kwargs


def with_values(tensor: torch.Tensor) -> torch.Tensor:
    """An input of the same kind that has values, if it has none: integers are 0, which any table has."""
    if not tensor.is_meta:
        return tensor
    return _made(tensor.shape, tensor.dtype, (0, 0), torch.Generator().manual_seed(0))


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta or not tensor.numel():
        return 0, 0
    whole = tensor.to(torch.int64)
    return max(int(whole.min()), -HIGHEST), int(whole.max())


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise PlanError(f"an input has a dtype of torch, found {name!r}; make the plan anew")
    return dtype


def _made(
    shape: Sequence[int], dtype: torch.dtype, bounds: tuple[int, int], generator: torch.Generator
) -> torch.Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        kind = dtype if dtype.is_complex else torch.float32
        return torch.randn(tuple(shape), dtype=kind, generator=generator).to(dtype)
    low, high = bounds
    return torch.randint(low, min(high, HIGHEST - 1) + 1, tuple(shape), generator=generator).to(dtype)
