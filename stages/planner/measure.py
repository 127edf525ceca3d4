"""First-iteration profile: seconds, bytes and zeros of every layer and value, measured on a copy.

Every layer runs by itself, for its seconds; all of them run once together, for what they save."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from ...compression.errors import PlanError
from ..device import Device, device_of
from ..seeds import seeded
from ..stage.receive import Receive
from ..tracing.aliases import memory_of
from ..tracing.capture.call import Call, Example
from ..tracing.layer_graph import LayerGraph
from ..tracing.layers import Layer, Parts, parts_of, run_layer
from ..tracing.probe import Probe
from .examples import signature_of
from .layer_profile import LayerProfile, Profile, ValueProfile
from .whole_step import whole_step
from .zeros import zero_count


def measure(graph: LayerGraph, example_inputs: Example, *, repeats: int = 5) -> Profile:
    """Run every layer of ``graph`` forward and backward by itself, on the copy of the model that was traced.

    Args:    example_inputs: one micro-batch, shaped as the example that was traced.
             repeats: runs of which the median is taken, after one that is not counted.
    Returns: the Profile; seconds are per micro-batch with the threads that torch has now. One thread counts
             its own seconds of a processor, not those in which other programs have it.
    Raises:  PlanError: the inputs do not suit the traced model.
    """
    if not isinstance(graph, LayerGraph) or not isinstance(repeats, int) or repeats < 1:
        raise PlanError(
            f"measure takes what trace(model, example) returned and repeats=1 or more, found a "
            f"{type(graph).__name__} and repeats={repeats!r}"
        )
    call, given = Call.of(graph.model_copy, example_inputs)
    shapes = tuple(tuple(x.shape) for x in given)
    if shapes != tuple(tuple(x.shape) for x in graph.example_inputs):
        raise PlanError(
            f"a profile is measured at the shapes that were traced, found {shapes}; trace with this example"
        )
    device = device_of(graph.example_inputs[0].device)
    inputs = tuple(x.to(device.torch) for x in given)
    buffers = [memory_of(b).clone() for b in graph.model_copy.buffers()]
    with device.current(), seeded(None, device.generators):
        runs = [_timed_run(graph, inputs, device) for _ in range(repeats + 1)][1:]
        seen, far = whole_step(graph, inputs)
    for buffer, before in zip(graph.model_copy.buffers(), buffers, strict=True):
        memory_of(buffer).copy_(before)
    owned = owned_parameters(graph)
    parameters = dict(graph.model_copy.named_parameters())
    return Profile(
        layers=tuple(
            LayerProfile(
                name=layer.name,
                module=layer.module,
                forward_seconds=statistics.median(run.seconds[i][0] for run in runs),
                backward_seconds=statistics.median(run.seconds[i][1] for run in runs),
                parameters=owned[i],
                num_parameters=sum(parameters[name].numel() for name in owned[i]),
                parameter_bytes=sum(parameters[name].nbytes for name in owned[i]),
                saved_bytes=seen.saved[i][0],
                packed_bytes=seen.saved[i][1],
            )
            for i, layer in enumerate(graph.train.layers)
        ),
        values=tuple(
            ValueProfile(
                name=value.name,
                producer=value.producer,
                users=tuple(sorted({min(user, len(owned) - 1) for user in value.users})),
                num_bytes=value.num_bytes,
                requires_grad=value.requires_grad,
                zero_fraction=runs[-1].zeros.get(number, 0.0),
                contributions=seen.contributions.get(number, 0),
            )
            for number, value in enumerate(graph.train_probe.values)
        ),
        refused=far | dict(graph.train_probe.refused),
        fingerprint=graph.fingerprint,
        input_shapes=shapes,
        input_dtypes=tuple(str(x.dtype).removeprefix("torch.") for x in inputs),
        num_samples=call.samples_of(inputs) or 1,
        threads=torch.get_num_threads(),
        device=inputs[0].device.type,
        torch=torch.__version__,
        signature=signature_of(call, inputs),
        leaves=tuple(graph.train.leaves),
        intermediates=seen.intermediates,
        backward_reads=seen.backward_reads,
    )


def owned_parameters(graph: LayerGraph) -> tuple[tuple[str, ...], ...]:
    """For every layer the parameters it is the first to use; layer 0 also owns those that none uses."""
    names = {id(parameter): name for name, parameter in graph.model_copy.named_parameters()}
    owned: list[list[str]] = []
    parts = parts_of(graph.model_copy, graph.train)
    for layer in graph.train.layers:
        found = [id(t) for t in parameters_of(layer, parts)]
        owned.append([names.pop(key) for key in found if key in names])
    owned[0].extend(names.values())
    return tuple(tuple(layer) for layer in owned)


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


@dataclasses.dataclass(slots=True)
class _Run:
    seconds: list[tuple[float, float]]
    zeros: dict[int, float]


def _timed_run(graph: LayerGraph, inputs: tuple[torch.Tensor, ...], device: Device) -> _Run:
    """Every layer forward and backward, on inputs received as from a stage: its backward is its own."""
    parts, record = parts_of(graph.model_copy, graph.train), graph.train_probe
    anchor = torch.zeros((), requires_grad=True, device=device.torch)
    env: dict[fx.Node, Any] = dict(zip(graph.train.inputs, inputs, strict=True))
    one = torch.get_num_threads() == 1 and not device.is_gpu
    clock = time.thread_time if one else device.now
    marks, zeros = list[tuple[Any, ...]](), dict[int, Callable[[], float]]()
    for index, layer in enumerate(graph.train.layers):
        local = {node: tree_map(lambda t: _received(t, anchor), env[node]) for node in _reads(layer, env)}
        begun = clock()
        result = run_layer(layer, local, parts, samples=record.samples)
        middle = clock()
        roots = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.grad_fn]
        gradients = [torch.ones_like(t) for t in roots]
        wanted = [anchor, *(p for p in parameters_of(layer, parts) if p.requires_grad)]
        backward = clock()
        if roots:
            _backward(layer, roots, wanted, gradients)
        marks.append((begun, middle, backward, clock() if roots else backward))
        _write_back(layer, index, local, env, record)
        env[layer.node] = result
        for number, leaf in zip(record.outputs[layer.node].values, tree_leaves(result), strict=True):
            if isinstance(leaf, torch.Tensor) and leaf.numel():
                zeros[number] = zero_count(leaf)
    device.synchronize()
    seconds = [(device.seconds(a, b), device.seconds(c, d) if c is not d else 0.0) for a, b, c, d in marks]
    return _Run(seconds, {number: count() for number, count in zeros.items()})


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
