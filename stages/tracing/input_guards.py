"""Guards of a record that read nothing but the model's inputs, as ``mask.all()`` does.

What they read is known ahead of the first layer, so that each micro-batch takes a record whose guards hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from ...compression.errors import PlanError
from .capture.call_spec import fresh
from .capture.nodes import follow_inputs
from .layers import Layer, Parts, Traced, casting, run_layer


class InputGuards:
    """The guards of ``traced`` that follow from its inputs alone, with the layers that lead to them.

    ``autocast``: the dtype under which it was recorded."""

    def __init__(self, traced: Traced, autocast: torch.dtype | None) -> None:
        self._traced, self._layers, self._autocast = traced, _leading_to_guards(traced), autocast

    def __bool__(self) -> bool:
        return bool(self._layers)

    def refusal(self, inputs: Sequence[torch.Tensor]) -> str:
        """Say which guard finds something else in ``inputs`` than when it was recorded; "": none does."""
        samples = self._traced.call.samples_of(inputs)
        env = dict(zip(self._traced.inputs, fresh(inputs), strict=True))  # a layer may write to them
        parts = Parts({}, dict(self._traced.constants)).on(inputs[0].device, self._traced.recorded)
        try:
            with torch.no_grad(), casting(self._autocast, inputs[0].device):
                for layer in self._layers:
                    env[layer.node] = run_layer(layer, env, parts, samples=samples)
        except PlanError as error:
            return str(error)
        return ""


def _leading_to_guards(traced: Traced) -> list[Layer]:
    """The layers that are needed to tell what such guards find, in running order."""
    nodes = [node for layer in traced.layers for node in (*layer.node.all_input_nodes, layer.node)]
    alone = follow_inputs([*traced.inputs, *dict.fromkeys(nodes)], traced.constants)
    guards = [layer.node for layer in traced.layers if "expect" in layer.node.meta and layer.node in alone]
    needed, left = set[fx.Node](), guards
    while left:
        node = left.pop()
        if node not in needed:
            needed.add(node)
            left += node.all_input_nodes
    return [layer for layer in traced.layers if layer.node in needed]
