"""First-iteration profile: seconds, bytes and zeros of every layer and value, measured on a copy.

Every layer runs by itself, for its seconds; all of them run once together, for what they save."""

from __future__ import annotations

import statistics

import torch

from ...compression.errors import PlanError
from ..device import device_of
from ..meta_watch import META
from ..seeds import seeded
from ..tracing.aliases import memory_of
from ..tracing.capture.call import Call, Example
from ..tracing.layer_graph import LayerGraph
from ..tracing.layers import parts_of
from .examples import signature_of, with_values
from .layer_profile import LayerProfile, Profile, ValueProfile
from .timed import blocks_of, parameters_of, timed_apart, timed_run
from .whole_step import whole_step


def measure(graph: LayerGraph, example_inputs: Example, *, repeats: int = 5) -> Profile:
    """Run every layer of ``graph`` forward and backward by itself, on the copy of the model that was traced.

    Of a model on the meta device one layer at a time has values, random ones; what layers save is told by
    shapes, and that nothing of it is zero.

    Args:    example_inputs: one micro-batch, shaped as the example that was traced; on the meta device its
             numbers are random, and its integers 0.
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
    bare = graph.train.recorded == META
    given = tuple(map(with_values, given))
    device = device_of(given[0].device if bare else graph.example_inputs[0].device)
    inputs = tuple(x.to(device.torch) for x in given)
    buffers = [memory_of(b).clone() for b in graph.model_copy.buffers()]
    tied: dict[int, str] = {}
    with device.current(), seeded(None, device.generators):
        if bare:
            runs = timed_apart(graph, inputs, device, repeats)
            with META:
                seen, far = whole_step(graph, graph.example_inputs)
        else:
            blocks, tied = blocks_of(graph, inputs, device)
            runs = [timed_run(graph, inputs, device, blocks) for _ in range(repeats)]
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
        refused=far | tied | dict(graph.train_probe.refused),
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
