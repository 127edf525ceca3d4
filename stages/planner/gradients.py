"""Gradients that no frame keeps, seen in one whole backward: a column of a wide one lies far apart, and made
dense it would pick other kernels and other bits. The model is not cut where they would cross."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ..tracing.layer_graph import LayerGraph
from ..tracing.layers import parts_of, run_layer, run_output
from ..tracing.probe import travels


def far_gradients(graph: LayerGraph, inputs: tuple[torch.Tensor, ...]) -> dict[int, str]:
    """Why not to cut behind a layer: across it the gradient of a value would come back in such a geometry."""
    parts, record, found = parts_of(graph.twin, graph.train), graph.train_probe, set[int]()

    def note(number: int) -> Callable[[torch.Tensor | None], None]:
        def look(gradient: torch.Tensor | None) -> None:  # a Function may give none
            if gradient is not None and not travels(gradient):
                found.add(number)

        return look

    env: dict[fx.Node, Any] = {n: x.clone() for n, x in zip(graph.train.inputs, inputs, strict=True)}
    for layer in graph.train.layers:
        env[layer.node] = run_layer(layer, env, parts, samples=record.samples)
        for number, leaf in zip(record.outputs[layer.node].values, tree_leaves(env[layer.node]), strict=True):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(note(number))
    outputs = tree_leaves(run_output(graph.train, env, parts))
    roots = [t for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    wanted = [p for p in graph.twin.parameters() if p.requires_grad]
    if roots and wanted:
        torch.autograd.grad(roots, wanted, [torch.ones_like(t) for t in roots], allow_unused=True)
    refused: dict[int, str] = {}
    for number in sorted(found):
        value = record.values[number]
        for cut in range(max(value.producer, 0), max(value.users, default=0)):
            refused.setdefault(
                cut, f"the gradient of {value.name}, whose elements lie far apart, would cross it"
            )
    return refused
