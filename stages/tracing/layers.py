"""Layers of a traced network, the parts of the model that they name, and how one is run.

Probe, profile and stage run layers by the same function, so what was proven on a copy holds for the run."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.func import functional_call
from torch.fx.node import map_arg

from ...compression.errors import PlanError
from ..device import CPU, autocast
from ..torch_private import tree_unflatten
from .capture.call_spec import Call, fresh
from .capture.capture import Recording
from .capture.dynamic_shapes import at_size, mapped, same_way
from .capture.nodes import follow_inputs, plain, where_of

_META = torch.device("meta")
_NOTHING = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One node of the recorded run; ``module`` is the dotted path it ran in.

    ``tied``: for every tied parameter of a module, (its name inside the module, the get_attr layer that
    reads it). ``holds``: whether it needs parameters or buffers that only its own stage has. ``moves``:
    whether its numbers follow the size of the micro-batch."""

    node: fx.Node
    module: str
    tied: tuple[tuple[str, fx.Node], ...] = ()
    holds: bool = False
    moves: bool = False

    @property
    def name(self) -> str:
        """The node's name, as torch.fx would give it: it stands in tables, in JSON and in ``cuts``."""
        return self.node.name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traced(Recording):
    """The recorded run of one mode (train or eval): input nodes, layers in running order, the output node.

    ``call`` says how the model is called; ``recorded`` is the device of the run."""

    inputs: tuple[fx.Node, ...]
    layers: tuple[Layer, ...]
    output: fx.Node
    call: Call
    recorded: torch.device

    @property
    def nodes(self) -> list[fx.Node]:
        """The placeholders, the node of every layer, and the output."""
        return [*self.inputs, *(layer.node for layer in self.layers), self.output]

    def check_same(self, model_copy: nn.Module, inputs: Sequence[torch.Tensor]) -> None:
        """Raise Different if ``model_copy`` goes another way on inputs of another shape or kind."""
        samples = self.call.samples_of(inputs)
        expects = [(n.target, at_size(n.meta["expect"], samples)) for n in self.nodes if "expect" in n.meta]
        same_way(self.nodes, self.again(model_copy, inputs, expects=expects), samples)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """Modules and tensors that some layers name, by dotted path; nothing else of the model is kept.

    ``elsewhere``: the device that a layer is told in the place of the one that was recorded, where that is
    another; on the meta device nothing has memory."""

    modules: dict[str, nn.Module]
    tensors: dict[str, torch.Tensor]
    elsewhere: Callable[[torch.device], torch.device] | None = None
    meta: bool = False

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors that the layers name, and those registered in their modules."""
        yield from self.tensors.items()
        for path, module in self.modules.items():
            yield from module.named_parameters(prefix=path)
            yield from module.named_buffers(prefix=path)

    def to_meta(self) -> Parts:
        """The same without memory; modules are those of a copy that has none."""
        tensors = {name: tensor.to("meta") for name, tensor in self.tensors.items()}
        return Parts(self.modules, tensors, lambda _: _META, meta=True)

    def on(self, device: torch.device, recorded: torch.device) -> Parts:
        """The same for a stage that computes on ``device``; what the model has is there already."""
        if device == recorded:
            return self
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return Parts(self.modules, tensors, lambda named: device if named == recorded else named)


def parts_of(
    root: nn.Module, traced: Traced, layers: Iterable[Layer] | None = None, *, output: bool = True
) -> Parts:
    """The parts of ``root`` that ``layers`` (default: all) use, and those that the ``output`` returns."""
    modules, tensors = names_of(traced, traced.layers if layers is None else layers, output=output)
    return Parts(
        {name: root.get_submodule(name) for name in modules},
        {name: tensor_at(root, name, traced.constants) for name in tensors},
    )


def parts_within(known: Parts, traced: Traced, layers: Iterable[Layer], *, output: bool) -> Parts:
    """The parts that ``layers`` of another record use, all of which are ``known``, but for its constants."""
    modules, tensors = names_of(traced, layers, output=output)
    held = {**known.tensors, **traced.constants}
    return Parts({name: known.modules[name] for name in modules}, {name: held[name] for name in tensors})


def names_of(traced: Traced, layers: Iterable[Layer], *, output: bool) -> tuple[list[str], list[str]]:
    """Names of the modules and of the tensors that ``layers`` use, and that the ``output`` returns."""
    nodes = [layer.node for layer in layers]
    modules = [str(node.target) for node in nodes if node.op == "call_module"]
    readers = [*nodes, traced.output] if output else nodes
    read = (*nodes, *(source for reader in readers for source in reader.all_input_nodes))
    own = set(nodes)
    tensors = [str(n.target) for n in read if n.op == "get_attr" and (is_local(n) or n in own)]
    return modules, tensors


def read_by_layer(layers: Iterable[Layer]) -> dict[str, set[str]]:
    """By the name of a layer, the modules and tensors that it reads by their paths."""
    read: dict[str, set[str]] = {}
    for node in (layer.node for layer in layers):
        sources = [one for one in (node, *node.all_input_nodes) if one.op == "get_attr"]
        sources += [node] * (node.op == "call_module")
        read[node.name] = {str(one.target) for one in sources}
    return read


def part_of(module: str, recompute: bool | Sequence[str]) -> str | None:
    """The part of a model whose layers run again together with one at path ``module``; None: it runs once.

    ``recompute``: True for all, or paths of modules, in which * stands for any name between two dots."""
    if isinstance(recompute, bool):
        return "" if recompute else None
    names = module.split(".") if module else []
    for path in recompute:
        wanted = path.split(".")
        if len(wanted) <= len(names) and all(map(fnmatch.fnmatchcase, names, wanted)):
            return ".".join(names[: len(wanted)])
    return None


def tensors_read(node: fx.Node, parts: Parts) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, buffers and constants that a node reads itself, by path: those of its module (tied ones
    too), its own if it is a get_attr, and local ones among its arguments."""
    if node.op == "call_module":
        module, path = parts.modules[str(node.target)], node.target
        yield from ((f"{path}.{n}", t) for n, t in (*module.named_parameters(), *module.named_buffers()))
    for source in (node, *node.all_input_nodes):
        if source.op == "get_attr" and (source is node or is_local(source)):
            yield str(source.target), parts.tensors[str(source.target)]


def tensor_at(root: nn.Module, name: str, constants: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor that a get_attr node names: a constant of the run, or one that ``root`` leads to."""
    return constants[name] if name in constants else operator.attrgetter(name)(root)


def casting(dtype: torch.dtype | None, device: torch.device = CPU) -> contextlib.AbstractContextManager[Any]:
    """Autocast to ``dtype`` (None: no cast) without its cache, which depends on what shares a stage."""
    return _NOTHING if dtype is None else autocast(dtype, device=device)


def is_local(node: fx.Node) -> bool:
    """Return whether a node reads a buffer, a constant or a frozen parameter: read where used, never sent."""
    return "local" in node.meta


def run_layer(
    layer: Layer,
    env: Mapping[fx.Node, Any],
    parts: Parts,
    tied: Mapping[fx.Node, torch.Tensor] | None = None,
    *,
    samples: int,
) -> Any:
    """Run one layer for a micro-batch of ``samples``; ``tied``: parameters that came from another stage."""
    modes = layer.node.meta.get("modes")  # that forward had switched when it was recorded
    with _NOTHING if modes is None else modes.entered():
        result = _called(layer, env, parts, tied or {}, samples)
    _check_result(layer, result, samples)
    return result


def _called(
    layer: Layer, env: Mapping[fx.Node, Any], parts: Parts, tied: Mapping[fx.Node, torch.Tensor], samples: int
) -> Any:
    node = layer.node
    if node.op == "get_attr":
        return parts.tensors[str(node.target)]

    def look(argument: fx.Node) -> Any:
        return parts.tensors[str(argument.target)] if "local" in argument.meta else env[argument]

    args: Sequence[Any] = [look(x) if type(x) is fx.Node else mapped(x, fx.Node, look) for x in node.args]
    kwargs = mapped(node.kwargs, fx.Node, look) if node.kwargs else {}
    if layer.moves:
        args, kwargs = at_size(args, samples), at_size(kwargs, samples)
    if parts.elsewhere is not None:
        if parts.meta and "expect" in node.meta:  # nothing can be read there
            return at_size(node.meta["expect"], samples)
        args, kwargs = (mapped(given, torch.device, parts.elsewhere) for given in (args, kwargs))
    if node.op == "call_function":
        return node.target(*args, **kwargs)  # type: ignore[operator]
    module = parts.modules[str(node.target)]
    if foreign := {name: tied[source] for name, source in layer.tied if source in tied}:
        return functional_call(module, foreign, tuple(args), kwargs)
    return module(*args, **kwargs)


def _check_result(layer: Layer, result: Any, samples: int) -> None:
    """Hold a result against what Python read of it when the run was recorded: the run went on from that."""
    node = layer.node
    if "expect" in node.meta:
        seen, found = at_size(node.meta["expect"], samples), plain(result)
    elif "shape" in node.meta:
        seen, found = at_size(node.meta["shape"], samples), tuple(result.shape)
    else:
        return
    if repr(seen) != repr(found):  # which tells 1 from True and 0.0 from -0.0, and NaN equals itself
        raise PlanError(
            f"forward read {_line(seen)} from {node.name}{where_of(node)} when it was recorded and goes on "
            f"from that, and now it is {_line(found)}; name the module around it in leaves="
        )


def _line(item: Any) -> str:
    text = str(item)
    return text if len(text) < 80 else f"{text[:60]}..."


def run_output(traced: Traced, env: Mapping[fx.Node, Any], parts: Parts, *, samples: int) -> Any:
    """Put together what the model returns from the results in ``env``, for so many samples."""
    leaves: Any = map_arg(
        traced.output.args[0], lambda node: parts.tensors[str(node.target)] if is_local(node) else env[node]
    )
    return tree_unflatten(at_size(list(leaves), samples), traced.spec)


def run_all(traced: Traced, parts: Parts, inputs: Sequence[torch.Tensor]) -> Any:
    """The whole recorded network, layer by layer."""
    env: dict[fx.Node, Any] = dict(zip(traced.inputs, inputs, strict=True))
    samples = traced.call.samples_of(inputs)
    for layer in traced.layers:
        env[layer.node] = run_layer(layer, env, parts, samples=samples)
    return run_output(traced, env, parts, samples=samples)


class InputGuards:
    """The guards of ``traced`` that read nothing but its inputs, as ``mask.all()`` does, with the layers that
    lead to them, in running order: each micro-batch takes a record whose guards hold.

    ``autocast``: the dtype under which it was recorded."""

    def __init__(self, traced: Traced, autocast: torch.dtype | None) -> None:
        nodes = [node for layer in traced.layers for node in (*layer.node.all_input_nodes, layer.node)]
        alone = follow_inputs([*traced.inputs, *dict.fromkeys(nodes)], traced.constants)
        left = [one.node for one in traced.layers if "expect" in one.node.meta and one.node in alone]
        needed = set[fx.Node]()
        while left:
            node = left.pop()
            if node not in needed:
                needed.add(node)
                left += node.all_input_nodes
        self._traced, self._autocast = traced, autocast
        self._layers = [layer for layer in traced.layers if layer.node in needed]

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
