"""The graph of a plan's model on ranks that were given the plan alone: traced with inputs like its own."""

import math
import operator
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...compression.errors import PlanError
from ..plan.plan import Plan
from ..tracing.capture.call_spec import Call, Constant, Example
from ..tracing.capture.signature import ArgumentPlace, Signature, form_of
from ..tracing.tracer import LayerGraph, trace

_MOST_VALUES = 256


def signature_of(call: Call, tensors: Sequence[Tensor]) -> Signature:
    """Return how a model was called with these tensors."""
    places: Any = [ArgumentPlace(i) for i in range(len(tensors))]
    return Signature(
        form=form_of(call.arguments(places)),
        names=call.names,
        whole=call.whole,
        values=tuple(map(_values, tensors)),
    )


def graph_of(
    model: nn.Module, plan: Plan, autocast: torch.dtype | None, graph: LayerGraph | None = None
) -> LayerGraph:
    """The graph of ``model`` as ``plan`` has it: ``graph`` or the plan's own if it fits, else traced anew."""
    for known in (graph, plan.graph):
        if known is not None and _is_meant(known, plan, autocast) and known.fits(model):
            return known
    return trace(model, example_of(plan), autocast=autocast, leaves=plan.leaves)


def _is_meant(graph: LayerGraph, plan: Plan, autocast: torch.dtype | None) -> bool:
    signature = plan.signature
    if signature is None:
        return False
    ours = signature_of(graph.train.call, graph.example_inputs)
    shapes = tuple(tuple(x.shape) for x in graph.example_inputs)
    dtypes = tuple(str(x.dtype).removeprefix("torch.") for x in graph.example_inputs)
    found = (shapes, dtypes, tuple(graph.train.leaves), graph.autocast, graph.fingerprint)
    meant = (plan.input_shapes, plan.input_dtypes, plan.leaves, autocast, plan.fingerprint)
    call = operator.attrgetter("form", "names", "whole")
    return found == meant and call(ours) == call(signature)


def example_of(plan: Plan) -> Example:
    """Inputs of the plan's shapes and dtypes: normal numbers, and integers that were seen, else 0.

    Raises: PlanError: the plan contradicts itself."""
    generator = torch.Generator().manual_seed(0)
    known, number = plan.signature, len(plan.input_shapes)
    if len(plan.input_dtypes) != number or (known and len(known.names) != number):
        raise PlanError("a plan has a name, a shape and a dtype for each input; make the plan anew")
    seen = known.values if known else [()] * number
    tensors: list[Any] = []
    for shape, name, values in zip(plan.input_shapes, plan.input_dtypes, seen, strict=True):
        if not isinstance(dtype := getattr(torch, name, None), torch.dtype):
            raise PlanError(f"an input has a dtype of torch, found {name!r}; make the plan anew")
        tensors.append(_made(shape, dtype, values, generator))
    if known is None:
        return tuple(tensors)
    pairs = zip(tensors, known.whole, strict=True)
    args, kwargs = known.arguments([Constant(x) if whole else x for x, whole in pairs])
    return args or kwargs


def with_values(tensor: Tensor) -> Tensor:
    """An input of the same kind that has values, if it has none: integers are 0, which any table has."""
    if not tensor.is_meta:
        return tensor
    return _made(tensor.shape, tensor.dtype, (), torch.Generator().manual_seed(0))


def _values(tensor: Tensor) -> tuple[int, ...]:
    """Integers or bools in ``tensor`` in ascending order; of many some, the first and the last among them."""
    if tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta:
        return ()
    found = tensor.to(torch.int64).unique().tolist()
    most = min(_MOST_VALUES, len(found))
    return tuple(found[place * (len(found) - 1) // max(1, most - 1)] for place in range(most))


def _made(
    shape: Sequence[int], dtype: torch.dtype, values: Sequence[int], generator: torch.Generator
) -> Tensor:
    if math.prod(shape) * dtype.itemsize > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise PlanError(
            f"an input of the shape {list(shape)} is more than the memory of this machine holds; make the "
            "plan anew with one micro-batch"
        )
    if dtype.is_floating_point or dtype.is_complex:
        kind = dtype if dtype.is_complex else torch.float32
        return torch.randn(tuple(shape), dtype=kind, generator=generator).to(dtype)
    values = values or (0,)
    return torch.tensor(values)[torch.randint(len(values), tuple(shape), generator=generator)].to(dtype)
