"""Routes of values between stages: every value travels along the chain of its users, stage to stage.

The same chain carries the gradient back, and each stage adds its part to what came from below, which is
autograd's own order of addition (a star, or adding afterwards, would give other bits).
"""

import bisect
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

from torch import fx

from ...compression.errors import PlanError
from ..tracing.dataflow import Probe
from ..tracing.layers import Layer, Traced, is_local
from ..tracing.tracer import LayerGraph

_UNCHANGING = (bool, int, float, str, type(None))


class Visit(NamedTuple):
    """A layer of a route, and what is known of its call before it runs."""

    layer: Layer
    args: tuple[Any, ...] | None  # numbers, and nodes whose results it takes; None: its call needs more care
    alone: int | None  # the value that its result is by itself; None: it is to be looked at more closely
    nodes: tuple[fx.Node, ...]  # that nothing on this stage needs behind it, and values
    values: tuple[int, ...]
    writes: frozenset[int]  # the values sent from here that it wrote to when it was traced


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Route:
    """One stage of a run; values are known by number."""

    traced: Traced
    record: Probe
    visits: tuple[Visit, ...]
    foreign: tuple[fx.Node, ...]  # of earlier stages, and inputs, whose results its layers read
    receives: tuple[tuple[int, int], ...]  # (value, source)
    sends: tuple[tuple[int, int], ...]  # (value, target), to the nearest stage first
    sent: frozenset[int]
    asks: tuple[int, ...]  # received values that asked for a gradient when they were traced
    inputs: tuple[int, ...]  # values that the model is given
    tied: tuple[int, ...]  # received values that are parameters
    forwards: frozenset[int]  # received values that are sent on as they came
    stops: frozenset[int]  # values whose zeros, as they are sent, stop their gradient
    returns: frozenset[int]  # received values to which a gradient surely comes back from here or later


def routes(traced: Traced, record: Probe, stage_of: Sequence[int], *, num_stages: int) -> tuple[Route, ...]:
    """The route of every stage; layer i runs on stage ``stage_of[i]``, inputs start on stage 0."""
    # 1. the chain of each value; the output reads last: users count it as one more layer
    known, places = record.values, (*stage_of, num_stages - 1)
    receives: list[list[tuple[int, int]]] = [[] for _ in range(num_stages)]
    sends: list[list[tuple[int, int]]] = [[] for _ in range(num_stages)]
    for number, value in enumerate(known):
        home = 0 if value.producer < 0 else places[value.producer]
        chain = sorted({home, *(places[user] for user in value.users)})
        if len(chain) > 1 and value.refused:
            raise PlanError(f"the network must not be cut here: {value.refused}")
        for source, target in pairwise(chain):
            sends[source].append((number, target))
            receives[target].append((number, source))
    # 2. a route of each stage
    routed = []
    for stage in range(num_stages):
        output = traced.output if stage == num_stages - 1 else None
        layers = {n: layer for n, layer in enumerate(traced.layers) if stage_of[n] == stage}
        last, received = max(layers, default=-1), [number for number, _ in receives[stage]]
        sent = {number: known[number] for number, _ in sends[stage]}
        written = {n for n, value in sent.items() if any(writer in layers for writer, _ in value.writers)}
        read = [node for layer in layers.values() for node in reads(layer)]
        read += [] if output is None else output.all_input_nodes
        own = {layer.node for layer in layers.values()}
        foreign = tuple(dict.fromkeys(node for node in read if node not in own and not is_local(node)))
        routed.append(
            Route(
                traced=traced,
                record=record,
                visits=_visits(layers, foreign, record, set(sent), output),
                foreign=foreign,
                receives=tuple(receives[stage]),
                sends=tuple(sorted(sends[stage], key=lambda send: (send[1], send[0]))),
                sent=frozenset(sent),
                asks=tuple(n for n in received if known[n].requires_grad),
                inputs=tuple(n for n, value in enumerate(known) if value.producer < 0 and not stage),
                tied=tuple(n for n in received if known[n].parameter),
                forwards=frozenset(set(received) & set(sent) - written),
                stops=frozenset(n for n, value in sent.items() if layers and value.stops(last)),
                returns=frozenset(
                    n for n in received if 0 <= (end := known[n].last_gradient_layer) and places[end] >= stage
                ),
            )
        )
    return tuple(routed)


def _visits(
    layers: Mapping[int, Layer],
    foreign: Sequence[fx.Node],
    record: Probe,
    sent: set[int],
    output: fx.Node | None,
) -> tuple[Visit, ...]:
    """The layers (by their number in the network), each with what dies with it: a node with its last reader,
    a value with the last node that holds it."""
    last = {node: -1 for node in foreign}
    for place, layer in enumerate(layers.values()):
        last[layer.node] = place
        last |= {node: place for node in reads(layer) if node in last}
    kept = set(output.all_input_nodes) if output is not None else set()
    values: dict[int, int] = {}
    for node, place in last.items():
        for number in record.outputs[node].values:
            end = len(layers) if number in sent or node in kept else place
            values[number] = max(values.get(number, -1), end)
    writers = {number: {writer for writer, _ in record.values[number].writers} for number in sent}
    return tuple(
        Visit(
            layer,
            _plain_args(layer, record),
            record.outputs[layer.node].alone,
            tuple(node for node, end in last.items() if end == place and node not in kept),
            tuple(number for number, end in values.items() if end == place),
            frozenset(number for number, found in writers.items() if index in found),
        )
        for place, (index, layer) in enumerate(layers.items())
    )


def _plain_args(layer: Layer, record: Probe) -> tuple[Any, ...] | None:
    """The arguments of a layer that runs the same way always, if all are results or unchanging numbers."""
    node = layer.node
    special = node.op == "get_attr" or node.kwargs or layer.moves or layer.tied or layer.name in record.seeded
    if special or not {"modes", "expect", "shape"}.isdisjoint(node.meta):
        return None
    plain = all(not is_local(a) if type(a) is fx.Node else type(a) in _UNCHANGING for a in node.args)
    return tuple(node.args) if plain else None


def reads(layer: Layer) -> list[fx.Node]:
    """The nodes that a layer reads, tied parameters included."""
    return [*layer.node.all_input_nodes, *(source for _, source in layer.tied)]


def edges(routed: Sequence[Route]) -> set[tuple[int, int]]:
    """The (source, target) pairs of stages that some value travels over."""
    return {(stage, target) for stage, route in enumerate(routed) for _, target in route.sends}


def stage_of_layers(traced: Traced, cuts: Sequence[str]) -> list[int]:
    """The stage of every layer, when the network is cut behind the layers ``cuts``."""
    stage, stages, behind = 0, [], set(cuts)
    for layer in traced.layers:
        stages.append(stage)
        stage += layer.name in behind
    return stages


def follow_cuts(first: Traced, stage_of: Sequence[int], graph: LayerGraph, *, num_stages: int) -> list[int]:
    """The stage of every layer of another record in train mode: each stage has the parts of the model that it
    has in the ``first``, and is cut behind the layer of the same name if there may be a cut.

    Raises: PlanError: parts come in another order, or there is no cut between those of two stages."""
    home = _homes(first, stage_of, graph.written)
    held = [
        [home[part] for part in _held(layer, graph.written) if part in home] for layer in graph.train.layers
    ]
    cut_behind = {  # the last of its stage
        stage: layer.name for layer, stage in zip(first.layers, stage_of, strict=True)
    }
    ends = []
    for stage in range(num_stages - 1):
        least = max((n for n, homes in enumerate(held) if min(homes, default=num_stages) <= stage), default=0)
        most = min((n for n, homes in enumerate(held) if max(homes, default=0) > stage), default=len(held))
        allowed = [n for n in range(least, most) if n not in graph.train_probe.refused and n + 1 < len(held)]
        if not allowed:
            raise PlanError(f"no cut keeps the parts of the model on stages {stage} and {stage + 1} apart")
        ends.append(next((n for n in allowed if graph.layers[n] == cut_behind[stage]), allowed[-1]))
    return [bisect.bisect_left(ends, number) for number in range(len(held))]


def follow(graph: LayerGraph, stage_of: Sequence[int], *, num_stages: int) -> list[int]:
    """The stage of every layer of the eval trace, which may hold other layers than the train trace.

    Parameters, modules that are not wholly tied, and what reads a buffer that training writes stay on the
    stage that trains or writes them; all others run as early as their arguments and the layers before them
    allow (earlier, an in-place layer could overtake a reader)."""
    train, evaluation, names = graph.train, graph.eval, [layer.name for layer in graph.eval.layers]
    if [layer.name for layer in train.layers] == names:
        return list(stage_of)
    home = _homes(train, stage_of, graph.written)
    stages: list[int] = []
    place: dict[fx.Node, int] = {}
    earliest = 0
    for layer in evaluation.layers:
        # a tied parameter waits on the stage that trains it, which may be one behind
        possible = max((earliest, *(place[node] for node in reads(layer) if node in place)))
        homes = [home[part] for part in _held(layer, graph.written) if part in home]
        stage = place[layer.node] = max(homes, default=possible)
        if layer.node.op != "get_attr":  # a parameter has no arguments and may wait for its first reader
            if min(homes, default=possible) < max(stage, possible):
                _refuse(f"layer {layer.name}", min(homes), max(stage, possible))
            earliest = stage
        stages.append(stage)
    for part in _written(evaluation.output, graph.written):
        if home.get(part, num_stages - 1) < num_stages - 1:
            _refuse(f"the output, {part},", home[part], num_stages - 1)
    return stages


def _homes(traced: Traced, stage_of: Sequence[int], written: Collection[str]) -> dict[object, int]:
    """Return the first stage that has each part of the model."""
    homes: dict[object, int] = {}
    for layer, stage in zip(traced.layers, stage_of, strict=True):
        for part in _held(layer, written):
            homes.setdefault(part, stage)
    return homes


def _held(layer: Layer, written: Collection[str]) -> list[object]:
    return [*([layer.node.target] if layer.holds else []), *_written(layer.node, written)]


def _written(node: fx.Node, written: Collection[str]) -> list[str]:
    """The buffers that training writes to, of those that a node reads or the module it calls holds."""
    read = {str(source.target) for source in node.all_input_nodes if is_local(source)}
    inside = f"{node.target}." if node.op == "call_module" else None
    return [name for name in written if name in read or (inside and name.startswith(inside))]


def _refuse(what: str, stage: int, behind: int) -> NoReturn:
    raise PlanError(
        f"the model takes another way in eval mode: {what} needs what stage {stage} holds and comes after "
        f"layers of stage {behind}; cut elsewhere"
    )
