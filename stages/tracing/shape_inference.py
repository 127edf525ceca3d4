"""Records of other micro-batch sizes: shapes and identities without memory or computation, on the meta
device (``Shapes``), else recorded anew (``Skeleton``).

A rank that holds only its own layers must know what every stage sends for a micro-batch of any size, and
identities can depend on it (a contiguous() of one sample does nothing). Where the meta device tells shapes
otherwise than a real run (attention kernels lay their results out otherwise there, experts chosen by value
have no shape at all), ``Shapes`` refuses every other size."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...compression.errors import PlanError
from ..meta_watch import MetaWatch
from ..torch_private import memory_id
from .capture.call_spec import Call, Constant
from .dataflow import Probe, probe
from .layers import Traced, parts_of
from .meta_model import has_meta, on_meta
from .model_checks import Leaf, as_written
from .tracer import LayerGraph, trace
from .verify import refuse_written

KEPT = 256  # records; texts of varying length would make ever more
SMALL = 1024  # elements of a parameter that keeps its values: a gate, a bias, what forward may look at


class Shapes:
    """Records of both traces at any micro-batch size; that of the example comes from the real run."""

    def __init__(self, graph: LayerGraph) -> None:
        self.traced = {"train": graph.train, "eval": graph.eval}
        self.real = {"train": graph.train_probe, "eval": graph.eval_probe}
        self.example, self.autocast = _key(graph.example_inputs), graph.autocast
        self.roots = {"train": on_meta(graph.model_copy), "eval": on_meta(graph.model_copy).eval()}
        modes = self.traced.items()
        self.differences = {mode: traced.fixed or self._difference(mode) for mode, traced in modes}
        self._of_other = functools.lru_cache(KEPT)(self._other_probe)

    def probe(self, mode: str, inputs: Sequence[torch.Tensor]) -> Probe:
        """The record of ``mode`` ("train" or "eval") for inputs of these shapes.

        Raises: PlanError: the model's shapes cannot be followed, or it does not take such a micro-batch."""
        key = _key(inputs)
        return self.real[mode] if key == self.example else self._of_other(mode, key)

    def _other_probe(self, mode: str, key: _Key) -> Probe:
        if reason := self.differences[mode]:
            raise self._other(key, f"this model's shapes cannot be told without running it ({reason})")
        try:
            found = self._run(mode, key)
        except PlanError:
            raise
        except Exception as error:
            why = f"the model does not run on it as it was traced ({error})"
            raise self._other(key, f"{why}; use micro-batches like the example") from error
        real = self.real[mode]
        return dataclasses.replace(found, random=real.random, seeded=real.seeded)

    def _run(self, mode: str, key: _Key) -> Probe:
        traced: Traced = self.traced[mode]
        inputs = _bare(key)
        parts = parts_of(self.roots[mode], traced).to_meta()
        with self._on_meta(mode):
            found = probe(traced, parts, inputs)
        if key != self.example:
            self._refuse_other_way(mode, key)
        real = self.real[mode]
        if len(real.values) != len(found.values):
            return found
        values = []
        for ours, theirs in zip(found.values, real.values, strict=True):
            # On the meta device, no write is seen by its bytes, and a dtype not as autocast makes it.
            lacks = {writer for writer, _ in ours.writers} - {writer for writer, _ in theirs.writers}
            writers = ours.writers if lacks else theirs.writers
            seen = {"dtype": theirs.dtype, "freed": theirs.freed}
            values.append(dataclasses.replace(ours, writers=writers, **seen))
        return dataclasses.replace(found, values=tuple(values), refused=real.refused | found.refused)

    @contextlib.contextmanager
    def _on_meta(self, mode: str) -> Iterator[None]:
        """A run on the meta device; PlanError if it writes to a parameter that the plan takes for
        unwritten."""
        root = self.roots[mode]
        owned = {name: (p, memory_id(p)) for name, p in root.named_parameters()}
        grad = torch.set_grad_enabled(mode == "train")
        with grad, as_written(), torch.device("meta"), MetaWatch() as watch:
            yield
        moved = {name for name, (p, place) in owned.items() if memory_id(p) != place}
        refuse_written(root, moved, {name for name, (_, place) in owned.items() if place in watch.writes})

    def _refuse_other_way(self, mode: str, key: _Key) -> None:
        """Refuse inputs with which the model's code may go another way than it was seen to go."""
        traced = self.traced[mode]
        samples = traced.call.samples_of(_bare(key))
        alike = self._kind(mode, self.example) == self._kind(mode, key)
        if alike and samples in traced.sizes:
            return
        try:
            with self._on_meta(mode):
                traced.check_same(self.roots[mode], _bare(key))
        except Exception as error:
            why = "forward does not go the same way with it, as far as can be told without running it"
            remedy = "use micro-batches like the example, or trace with one like them"
            raise self._other(key, f"{why} ({error}); {remedy}") from error

    def _other(self, key: _Key, why: str) -> PlanError:
        shown, example = (", ".join("x".join(map(str, x)) for x, *_ in one) for one in (key, self.example))
        return PlanError(f"a micro-batch has shapes {shown}, the example had {example}, and {why}")

    def _kind(self, mode: str, key: _Key) -> object:
        """Conditions of a record beside the number of samples."""
        return [
            (x.shape if whole else x.shape[1:], x.dtype, x.is_contiguous() or x.stride())
            for x, whole in zip(_bare(key), self.traced[mode].call.whole, strict=True)
        ]

    def _difference(self, mode: str) -> str:
        """Say what the meta device gets wrong at the example's own size; "" if nothing."""
        real = self.real[mode]
        try:
            meta = self._run(mode, self.example)
        except PlanError as error:
            return str(error)
        for node, outputs in real.outputs.items():
            if outputs != meta.outputs[node]:
                return f"the results of {node.name} differ on the meta device"
        facts = operator.attrgetter("shape", "dtype", "users", "writers")
        for value, other in zip(real.values, meta.values, strict=True):
            if facts(value) != facts(other):
                return f"the value {value.name} differs on the meta device"
        return ""


_Key = tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]


def _key(inputs: Sequence[torch.Tensor]) -> _Key:
    return tuple((tuple(x.shape), tuple(x.stride()), x.dtype) for x in inputs)


def _bare(key: _Key) -> list[torch.Tensor]:
    """Tensors of that geometry without memory."""
    return [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in key]


class Skeleton:
    """A model without the values of its parameters, from which it is recorded again for other shapes.

    A record does not depend on the values of large parameters: they are made up, the same on all ranks. Small
    ones and buffers keep the values that they had."""

    def __init__(self, model: nn.Module) -> None:
        self._devices = dict[str, torch.device]()  # of those that are made up
        if has_meta(model):
            self._model = on_meta(model)
            return
        without: dict[int, Any] = {}
        for name, p in model.named_parameters():
            numbers = p.is_floating_point() or p.is_complex()
            if type(p) is nn.Parameter and numbers and p.numel() > SMALL:
                self._devices[name] = p.device
                without[id(p)] = nn.Parameter(p.detach().to("meta"), p.requires_grad)
        self._model = copy.deepcopy(model, without)

    def graph(
        self,
        call: Call,
        inputs: Sequence[torch.Tensor],
        example: Sequence[torch.Tensor],
        *,
        autocast: torch.dtype | None,
        leaves: Iterable[Leaf],
    ) -> LayerGraph:
        """Record the model for ``inputs``, whose shapes alone count.

        Args:    example: inputs of another record; their values are taken.
        Raises:  PlanError: what ``trace`` refuses."""
        tensors = [_like(one, known) for one, known in zip(inputs, example, strict=True)]
        given: list[Any] = [Constant(t) if w else t for t, w in zip(tensors, call.whole, strict=True)]
        args, kwargs = call.arguments(given)
        parameters: dict[int, Any] = {}
        generator = torch.Generator().manual_seed(0)
        named = dict(self._model.named_parameters())
        for name, device in self._devices.items():
            values = _made_up(named[name], generator).to(device)
            parameters[id(named[name])] = nn.Parameter(values, named[name].requires_grad)
        model = copy.deepcopy(self._model, parameters)
        return trace(model, args or kwargs, autocast=autocast, leaves=leaves)


def _made_up(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values of about the size that layers begin with."""
    wide = math.prod(like.shape[1:]) if like.dim() > 1 else 1
    kind = like.dtype if like.is_complex() else torch.float32
    values = torch.randn(like.shape, dtype=kind, generator=generator, device=generator.device)
    values.div_(math.sqrt(max(1, wide)))
    out = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=generator.device)
    return out.copy_(values + (like.dim() == 1))


def _like(one: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape, strides and dtype of ``one`` with values of ``known``, over and over."""
    found = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=known.device).zero_()
    if known.numel():
        places = torch.arange(found.numel(), device=known.device) % known.numel()
        found.copy_(known.flatten()[places].view(one.shape))
    return found
