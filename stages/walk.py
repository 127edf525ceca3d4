"""Walk a stage's layers in order, and hold what each returns against the probe.

Routes and messages were made from the probe's record of values and identities, so a run that differs from it
would send the wrong tensor; it is refused at the layer where it begins to differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..compression.errors import StageError
from .layers import Layer, Parts, run_layer
from .memory.saved import Resident, Saved
from .probe import Probe
from .route import Route
from .seeds import seeded


def walk(
    values: dict[int, Any],
    parts: Parts,
    *,
    record: Probe,
    route: Route,
    saved: Saved | Resident,
    seed: Callable[[str], int] | None,
) -> dict[fx.Node, Any]:
    """Run the layers of ``route`` on ``values`` (by number), which grow by what the layers make.

    Args:    saved: is told which layer runs.
             seed: of a random layer by its name; None: nothing is random here.
    Returns: what is left for the outputs of the model, by node.
    Raises:  StageError: a layer failed, or did not do what it did when it was traced."""
    arrived = {node: record.outputs[node] for node in route.foreign}
    env: dict[fx.Node, Any] = {
        node: _rebuilt([values.get(number) for number in outputs.values], outputs.spec)
        for node, outputs in arrived.items()
    }
    tied = {node: tensor for node, tensor in env.items() if node.op == "get_attr"}
    numbers = {id(tensor): number for number, tensor in values.items()}
    for layer, (nodes, dead) in zip(route.layers, route.done, strict=True):
        saved.layer = layer
        try:
            if seed is not None and layer.name in record.random:
                with seeded(seed(layer.name)):
                    result = run_layer(layer, env, parts, tied, samples=record.samples)
            else:
                result = run_layer(layer, env, parts, tied, samples=record.samples)
        except Exception as error:
            raise StageError(f"layer {layer.name}: {type(error).__name__}: {error}") from error
        env[layer.node] = result
        _hold_against(record, layer, result, values, numbers)
        for node in nodes:
            del env[node]
        for number in dead:
            numbers.pop(id(values.pop(number, None)), None)
    return env


def _rebuilt(leaves: list[Any], spec: TreeSpec) -> Any:
    """A result put together from its leaves; torch.Size comes back as what it was, which slices show."""
    result = tree_unflatten(leaves, spec)
    return torch.Size(result) if spec.type is torch.Size and None not in leaves else result


def _hold_against(
    record: Probe, layer: Layer, result: Any, values: dict[int, Any], numbers: dict[int, int]
) -> None:
    """Refuse a run whose structure or identities differ from the probe: the routes were made from it."""
    expected = record.outputs[layer.node]
    leaves, spec = ([result], None) if isinstance(result, torch.Tensor) else tree_flatten(result)
    if len(leaves) != len(expected.values) or (spec is not None and spec != expected.spec):
        raise StageError(f"layer {layer.name} returned another structure than when it was traced")
    for number, leaf in zip(expected.values, leaves, strict=True):
        if not isinstance(leaf, torch.Tensor):
            values[number] = leaf
        elif values.setdefault(number, leaf) is not leaf or numbers.setdefault(id(leaf), number) != number:
            raise StageError(
                f"layer {layer.name} returned a tensor that was its input when it was traced, or the reverse"
            )
