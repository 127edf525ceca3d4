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
from ..tracing.layers import casting, parts_of, run_layer, run_output
from ..tracing.probe import travels
from .first_iteration import FirstIteration, Observed


def whole_step(graph: LayerGraph, inputs: tuple[torch.Tensor, ...]) -> tuple[Observed, dict[int, str]]:
    """What the layers save for their backward (every storage once, parameters and buffers never), and for a
    layer's number why not to cut behind it: the gradient of a value would cross in such a geometry."""
    parts, record, far = parts_of(graph.model_copy, graph.train), graph.train_probe, set[int]()
    first = FirstIteration(graph.model_copy)

    def note(number: int) -> Callable[[torch.Tensor | None], None]:
        def look(gradient: torch.Tensor | None) -> None:  # a Function may give none
            if gradient is not None and not travels(gradient):
                far.add(number)

        return look

    def made(node: fx.Node, result: Any) -> None:
        for number, leaf in zip(record.outputs[node].values, tree_leaves(result), strict=True):
            if isinstance(leaf, torch.Tensor):
                first.made(number, record.values[number].name, leaf)
                if leaf.grad_fn is not None:
                    leaf.register_hook(note(number))

    env: dict[fx.Node, Any] = {n: x.clone() for n, x in zip(graph.train.inputs, inputs, strict=True)}
    for node in graph.train.inputs:
        made(node, env[node])
    cast = casting(graph.autocast, graph.train.recorded)
    with torch.autograd.graph.saved_tensors_hooks(first.pack, first.unpack), cast:
        for layer in graph.train.layers:
            first.layer_begins()
            env[layer.node] = run_layer(layer, env, parts, samples=record.samples)
            made(layer.node, env[layer.node])
    outputs = tree_leaves(run_output(graph.train, env, parts))
    roots = [t for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    wanted = [p for p in graph.model_copy.parameters() if p.requires_grad]
    if roots and wanted:
        torch.autograd.grad(roots, wanted, [torch.ones_like(t) for t in roots], allow_unused=True)
    drew = [i for i, layer in enumerate(graph.train.layers) if layer.name in record.random]
    asked = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
    return first.observed(asked, drew), _refused(graph, far)


def _refused(graph: LayerGraph, far: set[int]) -> dict[int, str]:
    refused: dict[int, str] = {}
    for value in (graph.train_probe.values[number] for number in sorted(far)):
        for cut in range(max(value.producer, 0), max(value.users, default=0)):
            refused.setdefault(
                cut, f"the gradient of {value.name}, whose elements lie far apart, would cross it"
            )
    return refused
