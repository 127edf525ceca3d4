"""One whole step of a recorded network: what its layers save, and which gradients no frame keeps.

A column of a wide gradient lies far apart, and made dense it would pick other kernels and other bits: the
model is not cut where it would cross."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ..tracing.layer_graph import LayerGraph
from ..tracing.layers import parts_of, run_layer, run_output
from ..tracing.probe import travels


def whole_step(
    graph: LayerGraph, inputs: tuple[torch.Tensor, ...]
) -> tuple[list[tuple[int, int]], dict[int, str]]:
    """Bytes that each layer saves for its backward (every storage once, parameters and buffers never) and how
    many are left without zeros, and for a layer's number why not to cut behind it: the gradient of a value
    would cross in such a geometry."""
    parts, record, far = parts_of(graph.model_copy, graph.train), graph.train_probe, set[int]()
    seen = {t.untyped_storage()._cdata for t in (*graph.model_copy.parameters(), *graph.model_copy.buffers())}
    saved: list[tuple[int, int]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            size, (whole, left) = storage.nbytes(), saved[-1]
            packed = 1 - zero_count(tensor.detach())() + 1 / 32  # a bit for each word of 32
            saved[-1] = whole + size, left + min(size, round(size * packed))
        return tensor.detach()  # an output that its own layer saves would keep that layer for good

    def note(number: int) -> Callable[[torch.Tensor | None], None]:
        def look(gradient: torch.Tensor | None) -> None:  # a Function may give none
            if gradient is not None and not travels(gradient):
                far.add(number)

        return look

    env: dict[fx.Node, Any] = {n: x.clone() for n, x in zip(graph.train.inputs, inputs, strict=True)}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for layer in graph.train.layers:
            saved.append((0, 0))
            result = env[layer.node] = run_layer(layer, env, parts, samples=record.samples)
            for number, leaf in zip(record.outputs[layer.node].values, tree_leaves(result), strict=True):
                if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                    leaf.register_hook(note(number))
    outputs = tree_leaves(run_output(graph.train, env, parts))
    roots = [t for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    wanted = [p for p in graph.model_copy.parameters() if p.requires_grad]
    if roots and wanted:
        torch.autograd.grad(roots, wanted, [torch.ones_like(t) for t in roots], allow_unused=True)
    return saved, _refused(graph, far)


def zero_count(tensor: torch.Tensor) -> Callable[[], float]:
    """What tells the share of its elements that are zero, when it is called: until then no GPU is waited for.

    None are of what torch cannot count."""
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return float
    bits = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # torch counts no float8
    try:
        counted, number = torch.count_nonzero(bits), tensor.numel()
    except RuntimeError:  # nor integers without a sign
        return float
    return lambda: 1 - int(counted) / number


def _refused(graph: LayerGraph, far: set[int]) -> dict[int, str]:
    refused: dict[int, str] = {}
    for value in (graph.train_probe.values[number] for number in sorted(far)):
        for cut in range(max(value.producer, 0), max(value.users, default=0)):
            refused.setdefault(
                cut, f"the gradient of {value.name}, whose elements lie far apart, would cross it"
            )
    return refused
