"""Tensors of a replayed step: copies of what layers return and of its gradients, and a stop before a layer.

Copies are taken where a stage checks for NaN, and change no bit."""

from __future__ import annotations

import dataclasses
import functools
import math
import pdb
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...compression.names import HOST
from ...stages.files import save_picture
from ...stages.stage.nan_check import Watch
from ...stages.torch_private import is_view, tree_leaves, version_of
from ...stages.tracing.verify import same_bits

if TYPE_CHECKING:
    from ...stages.stage.stage import Stage
    from ...stages.stage.value_routing import Route
    from ...stages.tracing.dataflow import Probe
    from ...stages.tracing.layers import Layer

OF_MICRO_BATCH = ", micro-batch "
MOST_HISTOGRAMS = 24
MOST_NAMES = 80  # of layers under a picture
MOST_DIFFERENCE = 1e6  # that is drawn; one of NaN or infinite is more
_COLUMNS = 4
_MOST_DRAWN = 1e150  # in a histogram


@dataclasses.dataclass(slots=True)
class LayerTensor:
    """A tensor that a layer returned for a micro-batch of a step.

    Attributes:
        layer: Name of the layer, as in ``cuts=``.
        module: Path of the module that it ran in.
        stage: Number of the stage, from 0.
        micro_batch: Number in the step, from 0.
        place: Number among the tensors of the layer's result, from 0.
        output: A copy of the tensor in host memory; its digest on record.
        gradient: Gradient of the loss, times the micro-batch's share and the loss scale, by it, likewise;
            None where none was computed."""

    layer: str
    module: str
    stage: int
    micro_batch: int
    place: int
    output: Any
    gradient: Any = None

    def __str__(self) -> str:
        return f"layer {self.layer} ({self.module}), in micro-batch {self.micro_batch},"


def is_within(layer: Layer, name: str) -> bool:
    """Return whether ``name`` is that of the layer, or of a module that it is or runs in; "" is the model."""
    paths = layer.module, str(layer.node.target) if layer.node.op == "call_module" else ""
    return not name or layer.name == name or any(f"{path}.".startswith(f"{name}.") for path in paths)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory."""
    return tensor.detach().to(HOST, copy=True)


class LayerTensors:
    """Copies of what the layers under ``name`` return from now on, in ``found``; ``keep`` makes them of a
    tensor, in the forwards that begin while it is ``wanted``; without ``every_gradient`` not of gradients of
    which frames keep a part, where a ReLU lets them through."""

    def __init__(
        self,
        stages: Iterable[Stage],
        name: str,
        keep: Callable[[torch.Tensor], object] = copied,
        wanted: Callable[[], bool] = lambda: True,
        *,
        every_gradient: bool = True,
    ) -> None:
        self.name, self.keep, self.wanted, self.found = name, keep, wanted, list[LayerTensor]()
        self._every_gradient = every_gradient
        for stage in stages:
            stage.guard = _Copies(self, stage)

    def take(
        self, stage: int, micro_batch: int, record: Probe, unwritten: Callable[[Layer, torch.Tensor], bool],
        layer: Layer, result: Any,
    ) -> None:  # fmt: skip
        """Keep a layer's ``result`` but for ``unwritten`` memory, and its gradients once they are there."""
        if not is_within(layer, self.name):
            return
        for place, tensor in enumerate(tree_leaves(result)):
            if not isinstance(tensor, torch.Tensor) or unwritten(layer, tensor):
                continue
            one = LayerTensor(layer.name, layer.module, stage, micro_batch, place, self.keep(tensor))
            self.found.append(one)
            value = record.values[record.outputs[layer.node].values[place]]
            if not self._every_gradient and any(stops for _, stops in value.writers):
                continue
            # a look at the node of a view that was written to may make it anew, see nan_check.py
            if tensor.requires_grad and tensor.grad_fn and not (is_view(tensor) and version_of(tensor)):
                tensor.grad_fn.register_prehook(functools.partial(self._take_gradient, one, tensor.output_nr))

    def _take_gradient(self, one: LayerTensor, place: int, gradients: Sequence[torch.Tensor | None]) -> None:
        if (gradient := gradients[place]) is not None:
            one.gradient = self.keep(gradient)

    def named(self) -> dict[str, torch.Tensor]:
        """Return the copies by names for tables and files."""
        found: dict[str, torch.Tensor] = {}
        for one in in_order(self.found):
            output = f"output {one.place}" if one.place else "output"
            for kind, tensor in ((output, one.output), (f"{output} gradient", one.gradient)):
                if tensor is not None:
                    found[f"{one.layer} {kind}{OF_MICRO_BATCH}{one.micro_batch}"] = tensor
        return found


def in_order(found: Iterable[LayerTensor]) -> list[LayerTensor]:
    """Return tensors by layer, as they run, then by micro-batch."""
    by_stage = sorted(found, key=lambda one: one.stage)
    places = {layer: place for place, layer in enumerate(dict.fromkeys(one.layer for one in by_stage))}
    return sorted(by_stage, key=lambda one: (places[one.layer], one.micro_batch))


class _Copies:
    """Stands where a stage has its check for NaN, which goes on."""

    def __init__(self, tensors: LayerTensors, stage: Stage) -> None:
        self._tensors, self._stage, self._check = tensors, stage, stage.guard

    def watch(self, received: Mapping[int, Any], route: Route) -> Watch | None:
        """Return what the forward that begins calls with each layer and its result."""
        then = self._check.watch(received, route) if self._check else None
        if not self._tensors.wanted():
            return then
        micro_batch = next(reversed(self._stage.running))
        place = self._stage.index, micro_batch, route.record
        return _CopyingWatch(functools.partial(self._tensors.take, *place), then)


class _CopyingWatch(Watch):
    def __init__(self, take: Callable[..., None], then: Watch | None) -> None:
        super().__init__(gradients=False)
        self._take, self._then = take, then

    def __call__(self, layer: Layer, result: Any) -> None:
        self._take(self.is_unwritten, layer, result)
        if self._then is not None:
            self._then(layer, result)

    def check_loss(self, loss: torch.Tensor) -> None:
        if self._then is not None:
            self._then.check_loss(loss)


def stop_before(stages: Iterable[Stage], name: str) -> list[str]:
    """Open a debugger wherever the forward of a micro-batch comes to the layers under ``name``; return a list
    that grows by the layer each time."""
    stopped: list[str] = []

    def stop(done: Layer | None, layer: Layer | None) -> None:
        if layer is not None and is_within(layer, name) and not (done is not None and is_within(done, name)):
            print(f"before layer {layer.name}: env has the results of layers by node; s steps, c goes on")
            stopped.append(layer.name)
            pdb.Pdb(nosigint=True).set_trace(sys._getframe(1))

    for stage in stages:
        stage.observers = (*stage.observers, stop)
    return stopped


def paired(
    ours: Sequence[LayerTensor], theirs: Sequence[LayerTensor]
) -> list[tuple[LayerTensor, LayerTensor]] | None:
    """Return the tensors of two runs of a step, each with its twin, as they are ``in_order``; None where one
    run has layers or micro-batches that the other has not."""
    names = [[(one.layer, one.micro_batch, one.place) for one in tensors] for tensors in (ours, theirs)]
    return list(zip(ours, theirs, strict=True)) if names[0] == names[1] else None


def where_they_part(
    pairs: Sequence[tuple[LayerTensor, LayerTensor]], same: Callable[[Any, Any], bool] = same_bits
) -> tuple[LayerTensor, str] | None:
    """Return the first tensor whose output, else whose gradient, is not the ``same``, and how it differs."""
    for one, other in pairs:
        if not same(one.output, other.output):
            return one, f"is the first whose output differs{_by_how_much(one.output, other.output)}"
    layers = [*dict.fromkeys(one.layer for one, _ in pairs)]
    for one, other in sorted(pairs, key=lambda pair: -layers.index(pair[0].layer)):
        a, b = one.gradient, other.gradient
        if a is not None and b is not None and not same(a, b):
            return one, f"is the first with another gradient of its output{_by_how_much(a, b)}"
    return None


def _by_how_much(one: Any, other: Any) -> str:
    if not isinstance(one, torch.Tensor):
        return ""
    if one.shape != other.shape:
        return f", of shape {tuple(one.shape)} and {tuple(other.shape)}"
    return f", by up to {_relative(one, other):.2g} of the largest element"


def _relative(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """Largest difference of two tensors, as a part of the largest element of the first; infinite where one is
    finite and the other is not."""
    if one is None or other is None or one.shape != other.shape or not one.numel():
        return 0.0
    a, b = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in (one, other))
    finite = a.isfinite() & b.isfinite()
    if not a.isfinite().equal(b.isfinite()):
        return math.inf
    a, b = (x[finite].double() for x in (a, b))
    largest = a.abs().max().clamp(min=torch.finfo(torch.float64).tiny) if len(a) else 1.0
    return float((a - b).abs().max() / largest) if len(a) else 0.0


def differences(pairs: Iterable[tuple[LayerTensor, LayerTensor]]) -> dict[str, list[float]]:
    """Return for each layer how far its output and its gradient differ between two runs of a step, in the
    worst micro-batch."""
    worst: dict[str, list[float]] = {}
    for one, other in pairs:
        both = _relative(one.output, other.output), _relative(one.gradient, other.gradient)
        worst[one.layer] = [max(pair) for pair in zip(worst.get(one.layer, (0, 0)), both, strict=True)]
    return worst


def draw_differences(steps: Mapping[int, Mapping[str, Sequence[float]]], path: Path, *, title: str) -> None:
    """Draw the ``differences`` of some steps, a line for each."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    picture = Figure(figsize=(13, 7.5), layout="constrained")
    panels = picture.subplots(2, sharex=True)
    colours = colormaps["viridis_r"].resampled(len(steps) + 1)
    layers = [*next(iter(steps.values()))]
    for place, (axes, kind) in enumerate(zip(panels, ("output", "gradient of the output"), strict=True)):
        for number, (step, of_layers) in enumerate(steps.items(), start=1):
            values = [min(of_layers[layer][place], MOST_DIFFERENCE) for layer in layers]
            style: Any = {"color": colours(number), "label": f"step {step}", "clip_on": False}
            axes.plot(values, "o-", markersize=4, **style)
        axes.set_yscale("symlog", linthresh=1e-8)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("largest difference / largest element")
        axes.set_title(kind, loc="left", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    every = -(-len(layers) // MOST_NAMES)
    panels[1].set_xticks(range(0, len(layers), every), layers[::every], rotation=90, fontsize=7)
    panels[0].legend(frameon=False)
    picture.suptitle(title, x=0.005, ha="left", fontsize=11, parse_math=False)
    save_picture(path, picture)


def numbers_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as float64; of complex ones the real and the imaginary parts."""
    dense = tensor.detach().cpu()
    dense = dense if dense.layout is torch.strided else dense.to_dense()
    dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return dense.double().flatten()


def draw_histograms(tensors: Mapping[str, torch.Tensor], path: Path, *, title: str) -> None:
    """Draw a histogram for each of the first tensors of several elements, with a logarithmic axis."""
    from matplotlib.figure import Figure

    some = [(name, tensor) for name, tensor in tensors.items() if tensor.numel() > 1][:MOST_HISTOGRAMS]
    rows = max(1, -(-len(some) // _COLUMNS))
    picture = Figure(figsize=(13, 0.6 + 1.9 * rows), layout="constrained")
    every = list(picture.subplots(rows, _COLUMNS, squeeze=False).flat)
    for axes in every[len(some) :]:
        axes.set_axis_off()
    for axes, (name, tensor) in zip(every, some, strict=False):
        values = numbers_of(tensor)
        finite = values[values.isfinite()].clamp(-_MOST_DRAWN, _MOST_DRAWN)
        least, most = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
        if few := most - least <= 1e-12 * max(abs(least), abs(most)):  # too near each other for a division
            beside = max(0.5, 1e-3 * abs(least))
            least, most = least - beside, most + beside
        style: Any = {"color": "#0072B2", "log": len(finite) > 0}
        axes.hist(finite.numpy(), bins=1 if few else 50, range=(least, most), **style)
        odd = values.numel() - finite.numel()
        odd_ones = f" ({odd} not finite)" if odd else ""
        axes.set_title(f"{name}{odd_ones}", loc="left", fontsize=8, parse_math=False)
        axes.tick_params(which="both", labelsize=7)
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.get_offset_text().set_fontsize(7)
        axes.spines[["top", "right"]].set_visible(False)
    picture.suptitle(title, x=0.005, ha="left", fontsize=11, parse_math=False)
    save_picture(path, picture)
