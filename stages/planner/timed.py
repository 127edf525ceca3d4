"""The seconds of every layer, forward and backward by itself, and the zeros in what it returns.

A layer runs on copies of its inputs, received as from a stage: its backward is its own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from ...compression.errors import PlanError
from ..device import Device
from ..stage.receive import Receive
from ..tracing.layer_graph import LayerGraph
from ..tracing.layers import Layer, Parts, parts_of, run_layer
from ..tracing.probe import Probe
from .layer_values import parts_with_values
from .zeros import zero_count


@dataclasses.dataclass(slots=True)
class Run:
    """By layer its (forward, backward) seconds, and by value the share of its elements that are zero."""

    seconds: list[tuple[float, float]]
    zeros: dict[int, float]


def parameters_of(layer: Layer, parts: Parts) -> list[torch.Tensor]:
    """The parameters that a layer reads, tied ones (which are layers of their own) included."""
    if layer.node.op == "call_module":
        return list(parts.modules[str(layer.node.target)].parameters())
    local = [
        parts.tensors[str(n.target)]
        for n in (layer.node, *layer.node.all_input_nodes)
        if n.op == "get_attr" and str(n.target) in parts.tensors
    ]
    return [t for t in local if isinstance(t, torch.nn.Parameter)]


def timed_run(graph: LayerGraph, inputs: tuple[torch.Tensor, ...], device: Device) -> Run:
    """Run every layer once, in turn."""
    parts, record = parts_of(graph.model_copy, graph.train), graph.train_probe
    env: dict[fx.Node, Any] = dict(zip(graph.train.inputs, inputs, strict=True))
    timer, zeros = _Timer(device, samples=record.samples), dict[int, Callable[[], float]]()
    for index, layer in enumerate(graph.train.layers):
        result, local = timer.run(layer, env, parts)
        _write_back(layer, index, local, env, record)
        env[layer.node] = result
        zeros |= _zeros(layer, result, record)
    return Run(timer.seconds(), {number: count() for number, count in zeros.items()})


def timed_apart(
    graph: LayerGraph, inputs: tuple[torch.Tensor, ...], device: Device, repeats: int
) -> list[Run]:
    """The same runs of a model without values: all of one layer, which then gives its values up again."""
    record = graph.train_probe
    env: dict[fx.Node, Any] = dict(zip(graph.train.inputs, inputs, strict=True))
    timers, zeros = [_Timer(device, samples=record.samples) for _ in range(repeats + 1)], dict[int, float]()

    def run(index: int, layer: Layer) -> Any:
        parts = parts_with_values(graph, layer, device.torch)
        for timer in timers[:-1]:
            timer.run(layer, env, parts)
        result, local = timers[-1].run(layer, env, parts)
        _write_back(layer, index, local, env, record)
        zeros.update({number: count() for number, count in _zeros(layer, result, record).items()})
        return tree_map(_without_graph, result)  # which holds the layer's values

    for index, layer in enumerate(graph.train.layers):
        env[layer.node] = run(index, layer)
    return [Run(timer.seconds(), zeros) for timer in timers[1:]]


class _Timer:
    """Notes the seconds of one run, layer by layer."""

    def __init__(self, device: Device, *, samples: int) -> None:
        self.device, self.samples = device, samples
        self.anchor = torch.zeros((), requires_grad=True, device=device.torch)
        one = torch.get_num_threads() == 1 and not device.is_gpu
        self.clock = time.thread_time if one else device.now
        self.marks: list[tuple[Any, ...]] = []

    def run(self, layer: Layer, env: Mapping[fx.Node, Any], parts: Parts) -> tuple[Any, dict[fx.Node, Any]]:
        """What the layer returns, and the copies of its inputs that it ran on."""
        reads, clock = _reads(layer, env), self.clock
        local = {node: tree_map(lambda t: _received(t, self.anchor), env[node]) for node in reads}
        begun = clock()
        result = run_layer(layer, local, parts, samples=self.samples)
        middle = clock()
        roots = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.grad_fn]
        gradients = [torch.ones_like(t) for t in roots]
        wanted = [self.anchor, *(p for p in parameters_of(layer, parts) if p.requires_grad)]
        backward = clock()
        if roots:
            _backward(layer, roots, wanted, gradients)
        self.marks.append((begun, middle, backward, clock() if roots else backward))
        return result, local

    def seconds(self) -> list[tuple[float, float]]:
        """Of every layer forward and backward."""
        device = self.device
        device.synchronize()
        return [
            (device.seconds(a, b), device.seconds(c, d) if c is not d else 0.0) for a, b, c, d in self.marks
        ]


def _zeros(layer: Layer, result: Any, record: Probe) -> dict[int, Callable[[], float]]:
    """What tells the share of zeros in each tensor that a layer returned."""
    pairs = zip(record.outputs[layer.node].values, tree_leaves(result), strict=True)
    return {n: zero_count(leaf) for n, leaf in pairs if isinstance(leaf, torch.Tensor) and leaf.numel()}


def _without_graph(item: Any) -> Any:
    if not isinstance(item, torch.Tensor) or item.grad_fn is None:
        return item
    return item.detach().requires_grad_(item.requires_grad)


def _write_back(
    layer: Layer, index: int, local: Mapping[fx.Node, Any], env: Mapping[fx.Node, Any], record: Probe
) -> None:
    """What the layer wrote into copies of its inputs, into the inputs: later layers read it there."""
    for node, item in local.items():
        pairs = zip(record.outputs[node].values, tree_leaves(item), tree_leaves(env[node]), strict=True)
        for number, copied, original in pairs:
            if isinstance(copied, torch.Tensor) and (index, False) in record.values[number].writers:
                original.detach().copy_(copied.detach())


def _backward(
    layer: Layer, roots: list[torch.Tensor], wanted: list[torch.Tensor], gradients: list[torch.Tensor]
) -> None:
    """A layer's backward; a half of one, as some schedules run, asks for some gradients only, too."""
    try:
        torch.autograd.grad(roots, wanted, gradients, allow_unused=True)
    except Exception as error:
        if "use_reentrant" in str(error):
            raise PlanError(
                f"layer {layer.name} checkpoints with use_reentrant=True, which gives no gradient that "
                "is asked for by itself; use use_reentrant=False"
            ) from error
        raise PlanError(f"the backward of layer {layer.name}: {type(error).__name__}: {error}") from error


def _reads(layer: Layer, env: Mapping[fx.Node, Any]) -> list[fx.Node]:
    return [node for node in layer.node.all_input_nodes if node in env]


def _received(item: Any, anchor: torch.Tensor) -> Any:
    """A copy of a tensor as a stage would receive it; numbers as they are."""
    if not isinstance(item, torch.Tensor):
        return item
    copied = item.detach().clone()
    return Receive.apply(anchor, copied, {}, 0) if item.requires_grad else copied
