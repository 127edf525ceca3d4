"""Layers of a model on the meta device, given random values one layer at a time, to be measured.

Seconds hang on shapes and not on values, or hardly; zeros do, so of a ReLU's output about half are."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch

from ..tracing.contents import held_tensors
from ..tracing.layer_graph import LayerGraph
from ..tracing.layers import Layer, Parts, parts_of


def parts_with_values(graph: LayerGraph, layer: Layer, device: torch.device) -> Parts:
    """The parts of the model that ``layer`` uses, on ``device``: copies, with random values for none."""
    bare = parts_of(graph.model_copy, graph.train, [layer], output=False)
    known: dict[int, Any] = {}
    for module in bare.modules.values():
        known |= {id(tensor): _random(tensor, device) for tensor in held_tensors(module)}
    modules = {path: copy.deepcopy(module, known) for path, module in bare.modules.items()}
    tensors = {name: _random(tensor, device) for name, tensor in bare.tensors.items()}
    return Parts(modules, tensors).on(device, graph.train.recorded)


def _random(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """One of the same kind with values: those of a weight keep what runs through it about as large."""
    if not tensor.is_meta:
        return tensor
    made, trained = torch.zeros_like(tensor, device=device), isinstance(tensor, torch.nn.Parameter)
    if tensor.is_floating_point() and tensor.itemsize > 1:  # torch draws no float8
        with torch.no_grad():
            bound = math.sqrt(6 / max(1, math.prod(tensor.shape[1:]))) if tensor.dim() > 1 else 1.0
            made.uniform_(-bound, bound) if trained else made.fill_(1)
    return torch.nn.Parameter(made, tensor.requires_grad) if trained else made
