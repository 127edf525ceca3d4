"""First-iteration profile: seconds, bytes and zeros of every layer and value, measured on a copy.

Every layer runs by itself, for the seconds of its backward, on copies of its inputs, received as from a
stage. One that cannot run so (it differentiates what a layer ahead of it made, or turns its input in place)
runs with those ahead. By itself a layer takes up to a quarter longer than in a step, so all layers run
together, too: each forward takes what it takes there, and the backwards last as long as the whole one.

Layers of a model on the meta device are given random values one layer at a time: seconds hardly depend on
values."""

import copy
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from ...compression.errors import PlanError
from ..device import Device, device_of
from ..meta_watch import META
from ..seeds import seeded
from ..stage.run_layers import Receive
from ..torch_private import tree_leaves, tree_map
from ..tracing.aliases import memory_of
from ..tracing.capture.call_spec import Call, Examples, fresh
from ..tracing.dataflow import Probe
from ..tracing.layers import Layer, Parts, casting, parts_of, run_layer, tensors_read
from ..tracing.object_snapshot import held_tensors
from ..tracing.tracer import LayerGraph
from .examples import signature_of, with_values
from .network_profile import LayerProfile, Profile, ValueProfile
from .saved_tensors import observe_step, zero_count


def parts_with_random_values(graph: LayerGraph, layer: Layer, device: torch.device) -> Parts:
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


Inputs = tuple[torch.Tensor, ...]
Run = tuple[list[tuple[float, float]], dict[int, float]]
"""By layer its (forward, backward) seconds, and by value the share of its elements that are zero."""


def _parameters_of(layer: Layer, parts: Parts) -> list[torch.Tensor]:
    return [t for _, t in tensors_read(layer.node, parts) if isinstance(t, torch.nn.Parameter)]


def _blocks_of(graph: LayerGraph, inputs: Inputs, device: Device) -> tuple[list[range], dict[int, str]]:
    """Find the layers that run together: each by itself, but where it cannot, with the fewest ahead of it.

    Returns: ranges of layers, and for a layer's number why the model must not be cut behind it."""
    env: dict[fx.Node, Any] = dict(zip(graph.train.inputs, fresh(inputs), strict=True))
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
                reason = f"{type(error).__name__}: {error}"
                if not blocks:
                    raise PlanError(f"layer {layer.name} does not run on its own: {reason}") from error
                block = range(blocks.pop().start, index + 1)
        for cut in block[:-1]:
            refused.setdefault(cut, f"layer {layer.name} does not run apart from {layers[block.start].name}")
        blocks.append(block)
    return blocks, refused


def _timed_apart(graph: LayerGraph, inputs: Inputs, device: Device, repeats: int) -> list[Run]:
    """The same runs of a model without values: all of one layer, which then gives its values up again."""
    env: dict[fx.Node, Any] = dict(zip(graph.train.inputs, fresh(inputs), strict=True))
    timers, zeros = [_Timer(device, graph) for _ in range(repeats + 1)], dict[int, float]()

    def run(index: int, layer: Layer) -> None:
        parts = parts_with_random_values(graph, layer, device.torch)
        try:
            for timer in timers:
                timer.run(range(index, index + 1), env, parts)
        except PlanError:
            raise
        except Exception as error:
            reason = f"layer {layer.name} does not run on its own ({type(error).__name__}: {error})"
            raise PlanError(f"{reason}; measure the model with its values") from error

    for index, layer in enumerate(graph.train.layers):
        run(index, layer)
        zeros |= {number: count() for number, count in timers[-1].zeros.items()}
        for timer in timers:
            timer.zeros.clear()
        env[layer.node] = tree_map(  # without the graph, which holds the layer's values
            lambda x: x.detach().requires_grad_(x.requires_grad) if getattr(x, "grad_fn", None) else x,
            env[layer.node],
        )
    return [(timer.seconds(), zeros) for timer in timers[1:]]


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
        numbers = [number for layer in layers for number in record.outputs[layer.node].values]
        leaves = [leaf for layer in layers for leaf in tree_leaves(local[layer.node])]
        made = [(n, leaf) for n, leaf in zip(numbers, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
        roots = [t for n, t in made if t.grad_fn and max(record.values[n].users, default=0) >= block.stop]
        gradients = [torch.ones_like(t) for t in roots]
        wanted = [p for layer in layers for p in _parameters_of(layer, parts) if p.requires_grad]
        backward = clock()
        try:  # a half of a backward, as some schedules run, asks for some gradients only
            if roots:  # gradients are added to those of the run before, as in every micro-batch but the first
                torch.autograd.backward(roots, gradients, inputs=[self.anchor, *wanted])
        except Exception as error:
            if "use_reentrant" not in str(error):
                raise
            raise PlanError(
                f"layer {layers[-1].name} checkpoints with use_reentrant=True, which gives no gradient that "
                "is asked for by itself; use use_reentrant=False"
            ) from error
        _write_back(block, given, env, record)
        self.marks.append((begun, (backward, clock()) if roots else None))
        kept = [(n, leaf) for n, leaf in made if leaf.numel() and not record.values[n].freed]
        self.zeros |= {number: zero_count(leaf) for number, leaf in kept}
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


def _timed(blocks: Sequence[range], graph: LayerGraph, inputs: Inputs, device: Device, parts: Parts) -> Run:
    timer = _Timer(device, graph)
    env: dict[fx.Node, Any] = dict(zip(graph.train.inputs, fresh(inputs), strict=True))
    for block in blocks:
        timer.run(block, env, parts)
    return timer.seconds(), {number: count() for number, count in timer.zeros.items()}


def _as_together(
    apart: Sequence[tuple[float, float]], together: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return the forwards of layers that ran together, with the whole backward divided as theirs apart."""
    whole, parts = (sum(backward for _, backward in seconds) for seconds in (together, apart))
    scale = whole / parts if parts else 0.0
    return [(f, scale * b) for (f, _), (_, b) in zip(together, apart, strict=True)]


def _typical(runs: Sequence[Sequence[tuple[float, float]]]) -> list[list[float]]:
    """Return the medians of each layer's seconds, scaled so that they add up to the median of all runs: each
    run has slow moments, of which medians of single layers have none."""
    found = [
        [statistics.median(each) for each in zip(*layer, strict=True)] for layer in zip(*runs, strict=True)
    ]
    whole, medians = statistics.median(sum(map(sum, run)) for run in runs), sum(map(sum, found))
    scale = whole / medians if medians else 0.0
    return [[scale * seconds for seconds in layer] for layer in found]


def _write_back(
    block: range, given: Mapping[fx.Node, Any], env: Mapping[fx.Node, Any], record: Probe
) -> None:
    """Copy what layers wrote into copies of their inputs into the inputs, where later layers read it."""
    for node, item in given.items():
        pairs = zip(record.outputs[node].values, tree_leaves(item), tree_leaves(env[node]), strict=True)
        for number, copied, original in pairs:
            is_written = any((i, False) in record.values[number].writers for i in block)
            if is_written and isinstance(copied, torch.Tensor):
                original.detach().copy_(copied.detach())


def _received(item: Any, anchor: torch.Tensor) -> Any:
    """A copy of a tensor as a stage would receive it; numbers as they are."""
    if not isinstance(item, torch.Tensor):
        return item
    copied = item.detach().clone()
    return Receive.apply(anchor, copied, {}, 0) if item.requires_grad else copied


def measure(graph: LayerGraph, example_inputs: Examples, *, repeats: int = 5, packs: bool = False) -> Profile:
    """Run every layer of ``graph`` forward and backward by itself, on the copy of the model that was traced.

    Of a model on the meta device one layer at a time has values, random ones; what layers save is told by
    shapes, and that nothing of it is zero.

    Args:
        example_inputs: What was traced, or one micro-batch of the shape of the largest example; on the meta
            device its numbers are random, and its integers 0.
        repeats: Runs of which the median is taken, after one that is not counted.
        packs: Try every lossless codec on what may pass a cut, for plans with links; not on the meta device.

    Returns:
        The Profile; seconds are per micro-batch with the threads that torch has now. One thread counts its
        own seconds of a processor, not those in which other programs have it.

    Raises:
        PlanError: The inputs do not suit the traced model.
    """
    if not isinstance(graph, LayerGraph) or not isinstance(repeats, int) or repeats < 1:
        raise PlanError(
            f"measure takes what trace(model, example) returned and repeats=1 or more, found a "
            f"{type(graph).__name__} and repeats={repeats!r}"
        )
    call, given, _ = Call.of_several(graph.model_copy, example_inputs)
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
    runs, tied = list[Run](), dict[int, str]()
    with device.current(), seeded(None, device.generators):
        if bare:
            runs = _timed_apart(graph, inputs, device, repeats)
            with META:
                seen, far = observe_step(graph, graph.example_inputs)
        else:
            blocks, tied = _blocks_of(graph, inputs, device)
            parts = parts_of(graph.model_copy, graph.train)
            for _ in range(repeats):
                apart, zeros = _timed(blocks, graph, inputs, device, parts)
                together, _ = _timed([range(len(apart))], graph, inputs, device, parts)
                runs.append((_as_together(apart, together), zeros))
            graph.model_copy.zero_grad()
            seen, far = observe_step(graph, fresh(inputs), packs=packs)
    for buffer, before in zip(graph.model_copy.buffers(), buffers, strict=True):
        memory_of(buffer).copy_(before)
    owned, seconds = owned_parameters(graph), _typical([run for run, _ in runs])
    parameters = dict(graph.model_copy.named_parameters())
    return Profile(
        layers=tuple(
            LayerProfile(
                name=layer.name,
                module=layer.module,
                forward_seconds=seconds[i][0],
                backward_seconds=seconds[i][1],
                parameters=owned[i],
                num_parameters=sum(parameters[name].numel() for name in owned[i]),
                parameter_bytes=sum(parameters[name].nbytes for name in owned[i]),
                saved_bytes=seen.saved[i][0],
                packed_bytes=seen.saved[i][1],
                trained_bytes=sum(p.nbytes for p in map(parameters.__getitem__, owned[i]) if p.requires_grad),
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
                zero_fraction=runs[-1][1].get(number, 0.0),
                contributions=seen.contributions.get(number, 0),
                is_parameter=value.parameter,
                costs=dict(seen.costs.get(number, {})),
                gradient_costs=dict(seen.gradient_costs.get(number, {})),
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
        written=tuple(sorted(graph.written)),
        graph=graph.without_memory(),
    )


def owned_parameters(graph: LayerGraph) -> tuple[tuple[str, ...], ...]:
    """For every layer the parameters it is the first to use; layer 0 also owns those that none uses."""
    names = {id(parameter): name for name, parameter in graph.model_copy.named_parameters()}
    owned: list[list[str]] = []
    parts = parts_of(graph.model_copy, graph.train)
    for layer in graph.train.layers:
        found = [id(t) for t in _parameters_of(layer, parts)]
        owned.append([names.pop(key) for key in found if key in names])
    owned[0].extend(names.values())
    return tuple(tuple(layer) for layer in owned)
