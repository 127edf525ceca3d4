"""One whole step of a recorded network: which storages its layers save, who reads them and how often.

It also shows which gradients no frame keeps: a column of a wide gradient lies far apart, and made dense
it would pick other kernels and other bits, so the model is not cut where it would cross."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.autograd.graph import Node, get_gradient_edge

from ...compression.buffers import Pool
from ...compression.codec import encode
from ...compression.codec_cost import Cost, candidates, sample, trial
from ...compression.zero_value import has_bitmap
from ..memory.activations import ParameterFilter
from ..torch_private import current_node, memory_id, saved_tensors_hooks, tree_leaves
from ..tracing.dataflow import travels
from ..tracing.layers import casting, parts_of, run_layer, run_output
from ..tracing.tracer import LayerGraph
from .network_profile import CAST, FEATURES, INDEX, MASK, OTHER, STATISTIC, Intermediate


def zero_count(tensor: torch.Tensor) -> Callable[[], float]:
    """Return a function that tells the share of zeros among its elements: until then no GPU is waited for."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or not tensor.numel():
        return float
    bits = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # torch counts no float8
    try:
        counted, number = torch.count_nonzero(bits), tensor.numel()
    except RuntimeError:  # nor integers without a sign
        return float
    return lambda: 1 - int(counted) / number


@dataclasses.dataclass(slots=True)
class _Noted:
    """A storage that was saved; ``readers``: the backward's nodes that asked for it."""

    maker: int
    order: int
    tensor: torch.Size
    dtype: torch.dtype
    num_bytes: int
    zeros: float
    cast: bool
    savers: list[int] = dataclasses.field(default_factory=list)
    readers: set[tuple[str, int]] = dataclasses.field(default_factory=set)
    value: str = ""


class Observed(NamedTuple):
    """Observations: by layer its (saved bytes, bytes without zeros), the storages, the parameters and
    buffers that the backward of a layer reads; by value how many gradients are added up for it, and the cost
    of every codec on it and on its gradient."""

    saved: tuple[tuple[int, int], ...]
    intermediates: tuple[Intermediate, ...]
    backward_reads: dict[int, tuple[str, ...]]
    contributions: dict[int, int]
    costs: Mapping[int, dict[str, Cost]] = MappingProxyType({})
    gradient_costs: Mapping[int, dict[str, Cost]] = MappingProxyType({})


class _FirstIteration:
    """Looks on while the layers of a model run once, one after another, and then their backward."""

    def __init__(self, model: nn.Module) -> None:
        named = (*model.named_parameters(), *model.named_buffers())
        self._names = {memory_id(t): name for name, t in reversed(named)}
        self._weights = ParameterFilter(model.parameters())
        self._seen = set(self._names)
        self._saved: list[tuple[int, int]] = []
        self._sizes: list[int] = []  # elements of the largest tensor that a layer made or saved
        self._noted: dict[int, _Noted] = {}
        self._orders = Counter[int]()
        self._makers: dict[int, tuple[int, str]] = {}
        self._reads: dict[int, set[str]] = {}
        self._edges: dict[tuple[Node, int], int] = {}

    def layer_begins(self) -> None:
        self._saved.append((0, 0))
        self._sizes.append(0)

    def made(self, number: int, name: str, tensor: torch.Tensor) -> None:
        """The layer that runs, or whoever gave the inputs, made the value ``number``."""
        layer = len(self._saved) - 1
        if self._sizes:
            self._sizes[-1] = max(self._sizes[-1], tensor.numel())
        if tensor.layout is torch.strided:
            key = memory_id(tensor)
            self._makers.setdefault(key, (layer, name))
            noted = self._noted.get(key)
            if noted is not None and noted.maker == layer and not noted.value:
                noted.value = name
        if tensor.requires_grad:
            edge = get_gradient_edge(tensor)
            self._edges.setdefault((edge.node, edge.output_nr), number)

    def pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Noted | None]:
        """Note what the layer that runs saves, and keep it as it is."""
        storage, layer = tensor.untyped_storage(), len(self._saved) - 1
        key = memory_id(storage)
        if key not in self._seen:
            self._seen.add(key)
            size, (whole, left) = storage.nbytes(), self._saved[-1]
            zeros = zero_count(tensor.detach())()
            packed = min(size, round(size * (1 - zeros + 1 / 32)))  # a bit a word
            self._saved[-1] = whole + size, left + packed
            maker, name = self._makers.get(key, (layer, ""))
            order, cast = self._orders[layer], self._weights.holds(tensor)
            self._orders[layer] += 1
            noted = _Noted(maker, order, tensor.shape, tensor.dtype, size, zeros, cast, value=name)
            self._noted[key] = noted
        if (noted := self._noted.get(key)) is not None and layer not in noted.savers:
            noted.savers.append(layer)
        if (name := self._names.get(key)) is not None:
            self._reads.setdefault(layer, set()).add(name)
        self._sizes[-1] = max(self._sizes[-1], tensor.numel())
        return tensor.detach(), noted  # an output that its own layer saves would keep that layer for good

    def unpack(self, kept: tuple[torch.Tensor, _Noted | None]) -> torch.Tensor:
        tensor, noted = kept
        node = current_node()
        if noted is not None and node is not None:
            noted.readers.add(node)
        return tensor

    def observed(self, roots: Iterable[torch.Tensor], random: Iterable[int]) -> Observed:
        """Return what was seen, after the backward of ``roots``; ``random``: the layers that drew."""
        drawn = set(random)
        found = [
            Intermediate(
                maker=noted.maker,
                savers=tuple(noted.savers),
                order=noted.order,
                value=noted.value,
                kind=self._kind(noted, drawn),
                shape=tuple(noted.tensor),
                dtype=str(noted.dtype).removeprefix("torch."),
                num_bytes=noted.num_bytes,
                readers=len(noted.readers),
                zeros=noted.zeros,
            )
            for noted in self._noted.values()
        ]
        return Observed(
            saved=tuple(self._saved),
            intermediates=tuple(found),
            backward_reads={layer: tuple(sorted(names)) for layer, names in sorted(self._reads.items())},
            contributions=_contributions(roots, self._edges),
        )

    def _kind(self, noted: _Noted, random: set[int]) -> str:
        if noted.cast:
            return CAST
        if noted.dtype in (torch.bool, torch.uint8):
            return MASK
        if not noted.dtype.is_floating_point and not noted.dtype.is_complex:
            return INDEX
        if noted.value:
            return FEATURES
        if noted.savers[0] in random:
            return MASK
        if noted.tensor.numel() < self._sizes[noted.savers[0]]:
            return STATISTIC
        return FEATURES if noted.tensor.numel() else OTHER


def _contributions(roots: Iterable[torch.Tensor], edges: dict[tuple[Node, int], int]) -> dict[int, int]:
    """Count the nodes that give a gradient to each value, by its number, and the loss to an output.

    A value that a layer writes over has several places in the graph, and the most count."""
    asked = [get_gradient_edge(tensor) for tensor in roots]
    counts = Counter((edge.node, edge.output_nr) for edge in asked)
    ahead = list(dict.fromkeys(edge.node for edge in asked))
    seen = set(ahead)
    while ahead:
        for node, number in ahead.pop().next_functions:
            if node is not None:
                counts[node, number] += 1
                if node not in seen:
                    seen.add(node)
                    ahead.append(node)
    found: dict[int, int] = {}
    for edge, number in edges.items():
        found[number] = max(found.get(number, 0), counts[edge])
    return {number: count for number, count in sorted(found.items()) if count}


def observe_step(
    graph: LayerGraph, inputs: tuple[torch.Tensor, ...], *, packs: bool = False
) -> tuple[Observed, dict[int, str]]:
    """Return what the layers save for their backward (every storage once, parameters never), and for a
    layer's number why not to cut behind it: the gradient of a value would cross in such a geometry;
    ``packs``: every codec is tried on what may pass a cut."""
    parts, record, far = parts_of(graph.model_copy, graph.train), graph.train_probe, set[int]()
    first, pool = _FirstIteration(graph.model_copy), Pool()
    costs: dict[int, dict[str, Cost]] = {}
    gradient_costs: dict[int, dict[str, Cost]] = {}
    frames: dict[int, torch.Tensor] = {}  # of samples, whose bitmaps gradients use

    # A hook of the graph that knew ``first``, which knows nodes of it, would keep both for good.
    def look(number: int, gradient: torch.Tensor | None) -> None:  # a Function may give none
        if gradient is None:
            return
        if not travels(gradient):
            far.add(number)
        elif packs:
            gradient_costs.setdefault(number, _tried(gradient, pool, frames.get(number)))

    def made(node: fx.Node, result: Any) -> None:
        for number, leaf in zip(record.outputs[node].values, tree_leaves(result), strict=True):
            if isinstance(leaf, torch.Tensor):
                first.made(number, record.values[number].name, leaf)
                if packs and not record.values[number].parameter and travels(leaf):
                    costs[number] = _tried(leaf, pool)
                    if record.values[number].stops(len(graph.train.layers)):  # where it is zero
                        frames[number] = encode(sample(leaf.detach()))
                if leaf.grad_fn is not None:
                    leaf.register_hook(functools.partial(look, number))

    env: dict[fx.Node, Any] = {n: x.clone() for n, x in zip(graph.train.inputs, inputs, strict=True)}
    for node in graph.train.inputs:
        made(node, env[node])
    cast = casting(graph.autocast, graph.train.recorded)
    with saved_tensors_hooks(first.pack, first.unpack), cast:
        for layer in graph.train.layers:
            first.layer_begins()
            env[layer.node] = run_layer(layer, env, parts, samples=record.samples)
            made(layer.node, env[layer.node])
    outputs = tree_leaves(run_output(graph.train, env, parts, samples=record.samples))
    roots = [t for t in outputs if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    wanted = [p for p in graph.model_copy.parameters() if p.requires_grad]
    if roots and wanted:
        like = torch.randn_like if packs else torch.ones_like  # a sum of outputs may have no gradient
        torch.autograd.grad(roots, wanted, [like(t) for t in roots], allow_unused=True)
    drew = [i for i, layer in enumerate(graph.train.layers) if layer.name in record.random]
    asked = [t for t in outputs if isinstance(t, torch.Tensor) and t.requires_grad]
    refused: dict[int, str] = {}
    for value in (record.values[number] for number in sorted(far)):
        reason = f"the gradient of {value.name}, whose elements lie far apart, would cross it"
        for cut in range(max(value.producer, 0), max(value.users, default=0)):
            refused.setdefault(cut, reason)
    seen = first.observed(asked, drew)._replace(costs=costs, gradient_costs=gradient_costs)
    return seen, refused


def _tried(tensor: torch.Tensor, pool: Pool, mask: torch.Tensor | None = None) -> dict[str, Cost]:
    """Return the cost of every codec on a tensor that may pass a cut; ``mask``: the frame of a sample whose
    bitmap is used where a codec can."""
    part, size = sample(tensor.detach()), tensor.nbytes
    codecs = candidates(tensor.dtype, on_gpu=tensor.is_cuda)
    masks = {codec: mask if has_bitmap(codec) else None for codec in codecs}
    return {codec: trial(part, codec, pool, num_bytes=size, mask=masks[codec]) for codec in codecs}
