"""Which values a stage receives and sends: every value travels along the chain of its users, stage to stage.

producer -> first user -> next user: the same chain carries the gradient back, and each stage adds its part to
what came from below, which is autograd's own order of addition (a star, or adding afterwards, would give
other bits)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise

from torch import fx

from ..compression.errors import PlanError
from .layers import Layer, Traced, is_local
from .probe import Probe

HOLDS = ("call_module", "get_attr")  # what a stage owns a part of the model for


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One stage of a run: its layers; (value, source) it receives and (value, target) it sends.

    ``foreign`` are the nodes of earlier stages (and the model's inputs) whose results its layers read."""

    layers: tuple[Layer, ...]
    foreign: tuple[fx.Node, ...]
    receives: tuple[tuple[int, int], ...]
    sends: tuple[tuple[int, int], ...]


def routes(traced: Traced, record: Probe, stage_of: Sequence[int]) -> tuple[Route, ...]:
    """The route of every stage; layer i runs on stage ``stage_of[i]``, inputs start on stage 0."""
    num_stages = max(stage_of) + 1
    places = (
        *stage_of,
        num_stages - 1,
    )  # the output reads last: the users of a value count it as one more layer
    receives: list[list[tuple[int, int]]] = [[] for _ in range(num_stages)]
    sends: list[list[tuple[int, int]]] = [[] for _ in range(num_stages)]
    for number, value in enumerate(record.values):
        home = 0 if value.producer < 0 else places[value.producer]
        chain = sorted({home, *(places[user] for user in value.users)})
        if len(chain) > 1 and value.refused:
            raise PlanError(f"the network must not be cut here: {value.refused}")
        for source, target in pairwise(chain):
            sends[source].append((number, target))
            receives[target].append((number, source))
    layers = [
        tuple(t for t, s in zip(traced.layers, stage_of, strict=True) if s == i) for i in range(num_stages)
    ]
    return tuple(
        Route(
            layers=layers[stage],
            foreign=_foreign(layers[stage], traced.output if stage == num_stages - 1 else None),
            receives=tuple(receives[stage]),
            sends=tuple(
                sorted(sends[stage], key=lambda send: (send[1], send[0]))
            ),  # to the nearest stage first
        )
        for stage in range(num_stages)
    )


def _foreign(layers: Sequence[Layer], output: fx.Node | None) -> tuple[fx.Node, ...]:
    own = {layer.node for layer in layers}
    read = [
        node
        for layer in layers
        for node in (*layer.node.all_input_nodes, *(source for _, source in layer.lifted))
    ]
    read += [] if output is None else output.all_input_nodes
    return tuple(dict.fromkeys(node for node in read if node not in own and not is_local(node)))


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


def follow(train: Traced, stage_of: Sequence[int], evaluation: Traced) -> list[int]:
    """The stage of every layer of the eval trace, which may hold other layers than the train trace.

    Modules and parameters stay on the stage that holds them; other layers run as early as their arguments
    allow."""
    if [layer.name for layer in train.layers] == [layer.name for layer in evaluation.layers]:
        return list(stage_of)
    owner = {
        layer.node.target: s
        for layer, s in zip(train.layers, stage_of, strict=True)
        if layer.node.op in HOLDS
    }
    placed: dict[fx.Node, int] = {node: 0 for node in evaluation.inputs}
    for layer in evaluation.layers:
        sources = (*layer.node.all_input_nodes, *(source for _, source in layer.lifted))
        earliest = max((placed[node] for node in sources if not is_local(node)), default=0)
        stage = owner.get(layer.node.target, earliest) if layer.node.op in HOLDS else earliest
        if stage < earliest:
            raise PlanError(
                f"the model takes another way in eval mode: layer {layer.name} is held by stage {stage} and "
                "needs a result "
                f"of stage {earliest}; cut elsewhere"
            )
        placed[layer.node] = stage
    return [placed[layer.node] for layer in evaluation.layers]
