"""Walk a stage's layers in order, and hold what each returns against the probe: routes and messages were made
from its record, so a run that differs from it would send the wrong tensor."""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...compression.errors import StageError
from ..seeds import seeded
from ..torch_private import tree_flatten, tree_unflatten, version_of
from ..tracing.dataflow import Outputs, Probe, Value
from ..tracing.layers import Layer, Parts, run_layer
from .nan_check import Watch
from .value_routing import Route, Visit


class Receive(torch.autograd.Function):
    """Brings a received tensor into the graph as neither leaf nor view; its gradient is caught raw. A leaf
    would lay its gradient out anew, refuse to be written in place, and have its casts cached."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        """(anchor that asks for a gradient, tensor, gradients, number) -> another tensor over its memory."""
        _, tensor, ctx.gradients, ctx.number = args
        ctx.set_materialize_grads(False)
        return tensor.data  # over the same memory, and no view for autograd

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[None, None, None, None]:
        """Keep the gradient among ``gradients``, if there is one, and end the stage's backward here."""
        if gradients[0] is not None:
            ctx.gradients[ctx.number] = gradients[0]
        return None, None, None, None


def enter(
    received: Mapping[int, Any], route: Route, anchor: torch.Tensor, gradients: dict[int, torch.Tensor]
) -> dict[int, Any]:
    """Make what was received neither leaf nor view; its ``gradients`` are filled by number."""
    values = dict(received)
    for number in route.asks:
        item = values.get(number)
        if isinstance(item, torch.Tensor) and item.requires_grad:
            values[number] = Receive.apply(anchor, item.detach(), gradients, number)
    return values


Observer = Callable[[Layer | None, Layer | None], None]
NO_LAYERS: Collection[str] = frozenset()
_NOTHING = contextlib.nullcontext()


def walk(
    values: dict[int, Any], parts: Parts, *, route: Route, seed: Callable[[str], int] | None,
    observers: Sequence[Observer] = (), generators: Sequence[torch.Generator] = (),
    moved: Collection[str] = NO_LAYERS, watch: Watch | None = None,
) -> dict[fx.Node, Any]:  # fmt: skip
    """Run the layers of ``route`` on ``values`` (by number), which grow by what the layers make.

    Args:    seed: of a random layer by its name, for all ``generators``; None: nothing is random here.
             observers: are called with the layer that is done and the one that comes next.
             moved: names of layers whose modules are not set as they were when traced.
    Returns: what is left for the outputs of the model, by node."""
    record = route.record
    env = {node: _rebuilt(record.outputs[node], values) for node in route.foreign}
    numbers = {id(tensor): number for number, tensor in values.items()}
    done: Layer | None = None
    for visit in route.visits:
        layer, plain, alone, nodes, dead, _ = visit
        for observe in observers:
            observe(done, layer)
        done, name, target = layer, layer.node.name, layer.node.target
        try:
            if plain is not None and name not in moved:
                function: Any = parts.modules[target] if isinstance(target, str) else target
                result = function(*[env[one] if type(one) is fx.Node else one for one in plain])
            elif name in moved or name in record.seeded:
                with seeded(seed(name), generators) if seed else _NOTHING:
                    result = _freely(visit, env, values, parts, route=route)
            else:
                result = _run(layer, env, parts, route)
        except StageError:
            raise
        except Exception as error:
            raise StageError(f"layer {name}: {type(error).__name__}: {error}") from error
        if watch is not None:
            watch(layer, result)
        env[layer.node] = result
        if (
            alone is None
            or not isinstance(result, torch.Tensor)
            or values.setdefault(alone, result) is not result
            or numbers.setdefault(id(result), alone) != alone
        ):
            _hold_against(record, layer, result, values, numbers, sent=route.sent, moved=name in moved)
        for node in nodes:
            del env[node]
        for number in dead:
            numbers.pop(id(values.pop(number, None)), None)
    for observe in observers:
        observe(done, None)
    return env


def _run(layer: Layer, env: Mapping[fx.Node, Any], parts: Parts, route: Route) -> Any:
    tied = {node: env[node] for node in route.foreign if node.op == "get_attr" and node in env}
    return run_layer(layer, env, parts, tied, samples=route.record.samples)


def _freely(
    visit: Visit, env: Mapping[fx.Node, Any], values: Mapping[int, Any], parts: Parts, *, route: Route
) -> Any:
    """Run a layer that may do what it did not when it was traced, but write to what a route relies on."""
    relied = route.forwards | route.stops
    before = _versions(values, relied)
    result = _run(visit.layer, env, parts, route)
    for number, version in _versions(values, relied).items():
        if before[number] != version and number not in visit.writes:
            raise StageError(
                f"layer {visit.layer.name} wrote to the memory of {route.record.values[number].name}, which "
                "goes on to another stage, and did not when it was traced; cut elsewhere, or make the "
                "Pipeline anew"
            )
    return result


def _versions(values: Mapping[int, Any], relied: Collection[int]) -> dict[int, int]:
    items = {number: values.get(number) for number in relied}
    return {number: version_of(item) for number, item in items.items() if isinstance(item, torch.Tensor)}


def _rebuilt(outputs: Outputs, values: Mapping[int, Any]) -> Any:
    """A result put together from its leaves; torch.Size comes back as what it was, which slices show."""
    if outputs.alone is not None:
        return values.get(outputs.alone)
    leaves = [values.get(number) for number in outputs.values]
    result = tree_unflatten(leaves, outputs.spec)
    return torch.Size(result) if outputs.spec.type is torch.Size and None not in leaves else result


def _hold_against(
    record: Probe, layer: Layer, result: Any, values: dict[int, Any], numbers: dict[int, int], *,
    sent: Collection[int], moved: bool,
) -> None:  # fmt: skip
    """Refuse a run whose structure or identities differ from the probe: the routes were made from it."""
    expected = record.outputs[layer.node]
    leaves, spec = ([result], None) if isinstance(result, torch.Tensor) else tree_flatten(result)
    if len(leaves) != len(expected.values) or (spec is not None and spec != expected.spec):
        raise StageError(f"layer {layer.name} returned another structure than when it was traced")
    for number, leaf in zip(expected.values, leaves, strict=True):
        value = record.values[number]
        if not isinstance(leaf, torch.Tensor):
            if number in sent:
                raise StageError(
                    f"layer {layer.name} returned a tensor when it was traced, and {leaf!r} now, which would "
                    "cross a cut; return the same kind always, or cut elsewhere"
                )
            values[number] = leaf
            continue
        same = values.setdefault(number, leaf) is leaf
        known = numbers.setdefault(id(leaf), number) if same else None
        if known == number or (moved and _stays(value, number, known, sent)):
            continue
        raise StageError(
            f"layer {layer.name} returned a tensor that was its input when it was traced, or the reverse, "
            "and what is sent was planned for that; cut elsewhere, or make the Pipeline anew"
        )


def _stays(value: Value, number: int, known: int | None, sent: Collection[int]) -> bool:
    # No other stage sees that a value is another object than it was, as when dropout is switched. One object
    # in the place of two (its other number is ``known``) may be sent as one of them, if nobody writes to the
    # memory that both now have; a new one must not: later stages would get the old one.
    return number not in sent if known is None else known not in sent and len(value.writers) <= 1
