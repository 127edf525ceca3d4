"""The seconds of every layer, forward and backward by itself, and the zeros in what it returns.

A layer runs on copies of its inputs, received as from a stage: its backward is its own. One that cannot run
so (it differentiates what a layer ahead of it made, or turns its input in place) runs with those ahead."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from ...compression.errors import PlanError
from ..device import Device
from ..stage.receive import Receive
from ..tracing.layer_graph import LayerGraph
from ..tracing.layers import Layer, Parts, casting, parts_of, run_layer
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


def blocks_of(
    graph: LayerGraph, inputs: tuple[torch.Tensor, ...], device: Device
) -> tuple[list[range], dict[int, str]]:
    """Which layers run together: each by itself, but where it cannot, with the fewest ahead of it.

    Returns: ranges of layers, and for a layer's number why the model must not be cut behind it.
    Raises:  PlanError: a layer does not run even with all that are ahead of it."""
    env: dict[fx.Node, Any] = dict(zip(graph.train.inputs, inputs, strict=True))
    parts, layers, timer = parts_of(graph.model_copy, graph.train), graph.train.layers, _Timer(device, graph)
    blocks: list[range] = []
    refused: dict[int, str] = {}
    for index, layer in enumerate(layers):
        block = range(index, index + 1)
        while True:
            try:
                timer.run(block, env, parts)
                break
            except PlanError:
                raise
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                if not blocks:
                    raise PlanError(f"layer {layer.name} does not run on its own: {said}") from error
                block = range(blocks.pop().start, index + 1)
        for cut in block[:-1]:
            refused.setdefault(cut, f"layer {layer.name} does not run apart from {layers[block.start].name}")
        blocks.append(block)
    return blocks, refused


def timed_run(
    graph: LayerGraph, inputs: tuple[torch.Tensor, ...], device: Device, blocks: Sequence[range]
) -> Run:
    """Run every block of layers once, in turn."""
    parts, timer = parts_of(graph.model_copy, graph.train), _Timer(device, graph)
    env: dict[fx.Node, Any] = dict(zip(graph.train.inputs, inputs, strict=True))
    for block in blocks:
        timer.run(block, env, parts)
    return Run(timer.seconds(), {number: count() for number, count in timer.zeros.items()})


def timed_apart(
    graph: LayerGraph, inputs: tuple[torch.Tensor, ...], device: Device, repeats: int
) -> list[Run]:
    """The same runs of a model without values: all of one layer, which then gives its values up again."""
    env: dict[fx.Node, Any] = dict(zip(graph.train.inputs, inputs, strict=True))
    timers, zeros = [_Timer(device, graph) for _ in range(repeats + 1)], dict[int, float]()

    def run(index: int, layer: Layer) -> None:
        parts = parts_with_values(graph, layer, device.torch)
        try:
            for timer in timers:
                timer.run(range(index, index + 1), env, parts)
        except PlanError:
            raise
        except Exception as error:
            said = f"layer {layer.name} does not run on its own ({type(error).__name__}: {error})"
            raise PlanError(f"{said}; measure the model with its values") from error

    for index, layer in enumerate(graph.train.layers):
        run(index, layer)
        zeros |= {number: count() for number, count in timers[-1].zeros.items()}
        for timer in timers:
            timer.zeros.clear()
        env[layer.node] = tree_map(_without_graph, env[layer.node])  # which holds the layer's values
    return [Run(timer.seconds(), zeros) for timer in timers[1:]]


class _Timer:
    """Notes the seconds of one run, block by block, and what counts the zeros of each value."""

    def __init__(self, device: Device, graph: LayerGraph) -> None:
        self.device, self.graph, self.record = device, graph, graph.train_probe
        self.anchor = torch.zeros((), requires_grad=True, device=device.torch)
        one = torch.get_num_threads() == 1 and not device.is_gpu
        self.clock = time.thread_time if one else device.now
        self.marks: list[tuple[list[Any], tuple[Any, Any] | None]] = []
        self.zeros: dict[int, Callable[[], float]] = {}

    def run(self, block: range, env: dict[fx.Node, Any], parts: Parts) -> None:
        """Run layers on copies of what they read in ``env``, forward and backward; put there what they make
        and what they write to."""
        layers, clock, record = [self.graph.train.layers[i] for i in block], self.clock, self.record
        own = {layer.node for layer in layers}
        reads = dict.fromkeys(n for layer in layers for n in layer.node.all_input_nodes if n in env)
        local = {n: tree_map(lambda t: _received(t, self.anchor), env[n]) for n in reads if n not in own}
        given, begun = dict(local), [clock()]
        with casting(self.graph.autocast, self.device.torch):
            for layer in layers:
                local[layer.node] = run_layer(layer, local, parts, samples=record.samples)
                begun.append(clock())
        made = [
            (number, leaf)
            for layer in layers
            for number, leaf in zip(
                record.outputs[layer.node].values, tree_leaves(local[layer.node]), strict=True
            )
            if isinstance(leaf, torch.Tensor)
        ]
        roots = [t for n, t in made if t.grad_fn and max(record.values[n].users, default=0) >= block.stop]
        gradients = [torch.ones_like(t) for t in roots]
        wanted = [p for layer in layers for p in parameters_of(layer, parts) if p.requires_grad]
        backward = clock()
        if roots:
            _backward(layers[-1], roots, [self.anchor, *wanted], gradients)
        _write_back(block, given, env, record)
        self.marks.append((begun, (backward, clock()) if roots else None))
        self.zeros |= {number: zero_count(leaf) for number, leaf in made if leaf.numel()}
        env |= {layer.node: local[layer.node] for layer in layers}

    def seconds(self) -> list[tuple[float, float]]:
        """Of every layer forward and backward; a backward of several is divided like their forwards."""
        self.device.synchronize()
        found: list[tuple[float, float]] = []
        for begun, back in self.marks:
            forward = [self.device.seconds(a, b) for a, b in pairwise(begun)]
            whole = self.device.seconds(*back) if back else 0.0
            found += [(f, whole * (f / sum(forward) if sum(forward) else 1 / len(forward))) for f in forward]
        return found


def _without_graph(item: Any) -> Any:
    if not isinstance(item, torch.Tensor) or item.grad_fn is None:
        return item
    return item.detach().requires_grad_(item.requires_grad)


def _write_back(
    block: range, given: Mapping[fx.Node, Any], env: Mapping[fx.Node, Any], record: Probe
) -> None:
    """What layers wrote into copies of their inputs, into the inputs: later layers read it there."""
    for node, item in given.items():
        pairs = zip(record.outputs[node].values, tree_leaves(item), tree_leaves(env[node]), strict=True)
        for number, copied, original in pairs:
            if isinstance(copied, torch.Tensor) and any(
                (i, False) in record.values[number].writers for i in block
            ):
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
        raise


def _received(item: Any, anchor: torch.Tensor) -> Any:
    """A copy of a tensor as a stage would receive it; numbers as they are."""
    if not isinstance(item, torch.Tensor):
        return item
    copied = item.detach().clone()
    return Receive.apply(anchor, copied, {}, 0) if item.requires_grad else copied
