"""Records of other micro-batch sizes: shapes and identities without memory or computation, on the meta
device.

A rank that holds only its own layers cannot run the whole network any more, but it must know what every
stage sends for a micro-batch of any size: identities can depend on it (a contiguous() of one sample does
nothing).

Where the meta device tells a model's shapes otherwise than a real run (attention kernels lay their results
out otherwise there, experts chosen by value have no shape at all), real runs at a few sizes are scaled:
every size in a shape is affine in the number of samples, or the record holds for the sizes that ran alone.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from ...compression.errors import PlanError
from ..device import device_of, home_of
from ..meta_watch import MetaWatch
from ..seeds import seeded
from ..torch_private import memory_id
from .capture.call_spec import resized
from .capture.dynamic_shapes import Affine, affine_of, at_size
from .dataflow import Probe, Value, probe
from .layers import Traced, casting, parts_of
from .meta_model import on_meta
from .model_checks import as_written
from .tracer import LayerGraph
from .verify import refuse_written


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """``real``: records by number of samples; ``shapes``: for every value its shape, with ``Affine`` sizes;
    ``reason``: why no other number of samples can be told, "" where any can; ``failed``: what a size failed
    with."""

    real: dict[int, Probe]
    shapes: tuple[tuple[int | Affine, ...], ...]
    reason: str
    failed: dict[int, str]

    def at(self, samples: int) -> Probe:
        """The record at this many samples.

        Raises: PlanError: it cannot be told."""
        if samples in self.real:
            return self.real[samples]
        if reason := self.failed.get(samples, self.reason) or ("" if samples > 1 else "it did not run"):
            raise PlanError(reason)
        first = next(iter(self.real.values()))
        values = tuple(
            dataclasses.replace(value, shape=at_size(shape, samples), strides=None)
            for value, shape in zip(first.values, self.shapes, strict=True)
        )
        return dataclasses.replace(first, values=values, samples=samples)


def scaled(traced: Traced, copies: Callable[[], nn.Module], example: Sequence[torch.Tensor]) -> Scaled:
    """Run ``traced`` at the sizes that it was recorded at, each on a fresh copy of the model."""
    real: dict[int, Probe] = {}
    failed: dict[int, str] = {}
    for size in traced.sizes:
        try:
            real[size] = probe(traced, parts_of(copies(), traced), resized(traced.call, example, size))
        except Exception as error:
            failed[size] = f"it does not run on {size} samples: {error}"
    several = {size: record for size, record in real.items() if size > 1}
    shapes, reason = _shapes(several)
    tables = f"numbers in forward follow no rule but at {', '.join(map(str, real))} samples"
    return Scaled(
        real=real, shapes=shapes, reason=reason or (tables if traced.has_tables else ""), failed=failed
    )


def _shapes(records: dict[int, Probe]) -> tuple[tuple[tuple[int | Affine, ...], ...], str]:
    """The shape of every value over the number of samples, and why there is none, if so."""
    if len(records) < 2:
        return (), "it runs on too few sizes to tell another"
    probes = list(records.values())
    for other in probes[1:]:
        if _structure(other) != _structure(probes[0]):
            return (), "what its layers return and write differs between sizes"
    shapes = []
    for values in zip(*(record.values for record in probes), strict=True):
        if len({len(value.shape) for value in values}) > 1:
            return (), f"the dimensions of {values[0].name} differ between sizes"
        columns = zip(*(value.shape for value in values), strict=True)
        rows = [affine_of(dict(zip(records, column, strict=True))) for column in columns]
        if None in rows:
            return (), f"the shape of {values[0].name} follows no rule"
        shapes.append(tuple(row for row in rows if row is not None))
    return tuple(shapes), ""


def _structure(record: Probe) -> object:
    values = [dataclasses.replace(value, shape=(), strides=None) for value in record.values]
    return values, record.outputs, record.refused


KEPT = 256  # records; texts of varying length would make ever more


class Shapes:
    """Records of both traces at any micro-batch size; that of the example comes from the real run."""

    def __init__(self, graph: LayerGraph, model: nn.Module) -> None:
        self.traced = {"train": graph.train, "eval": graph.eval}
        self.real = {"train": graph.train_probe, "eval": graph.eval_probe}
        self.example, self.autocast = _key(graph.example_inputs), graph.autocast
        self.roots = {"train": on_meta(graph.model_copy), "eval": on_meta(graph.model_copy).eval()}
        self.known: dict[tuple[str, object], Probe] = {}
        self.differences = {
            mode: traced.fixed or self._difference(mode) for mode, traced in self.traced.items()
        }
        self.scaled = {
            mode: self._scaled(model, mode, graph.example_inputs)
            for mode, difference in self.differences.items()
            if difference and not self.traced[mode].fixed
        }

    def probe(self, mode: str, inputs: Sequence[torch.Tensor]) -> Probe:
        """The record of ``mode`` ("train" or "eval") for inputs of these shapes.

        Raises: PlanError: the model's shapes cannot be followed, or it does not take such a micro-batch."""
        key = _key(inputs)
        if key == self.example:
            return self.real[mode]
        if (mode, key) not in self.known:
            try:
                found = self._extrapolated(mode, key) if self.differences[mode] else self._run(mode, key)
            except PlanError:
                raise
            except Exception as error:
                why = f"the model does not run on it as it was traced ({error})"
                raise self._other(key, f"{why}; use micro-batches like the example") from error
            if len(self.known) == KEPT:
                del self.known[next(iter(self.known))]
            real = self.real[mode]
            self.known[mode, key] = dataclasses.replace(found, random=real.random, seeded=real.seeded)
        return self.known[mode, key]

    def _extrapolated(self, mode: str, key: _Key) -> Probe:
        """The record where the meta device cannot tell it."""
        reason = self.differences[mode]
        samples = self.traced[mode].call.samples_of(_bare(key))
        others = [size[1:] for size, *_ in key] != [size[1:] for size, *_ in self.example]
        if mode in self.scaled and not others:
            self._refuse_other_way(mode, key)
            try:
                return self.scaled[mode].at(samples)
            except PlanError as error:
                reason = str(error)
        why = f"this model's shapes cannot be told without running it ({reason}); use equal micro-batches"
        raise self._other(key, f"{why} of the example's size")

    def _scaled(self, model: nn.Module, mode: str, example: Sequence[torch.Tensor]) -> Scaled:
        """Records of real runs at a few sizes, on copies that stand in ``mode``."""

        def copies() -> nn.Module:
            model_copy = copy.deepcopy(model)
            if mode == "eval" or not model_copy.training:  # modules keep their own flags, as in the trace
                model_copy.train(mode == "train")
            return model_copy

        grad = torch.set_grad_enabled(mode == "train")
        home = home_of(model)
        with seeded(None, device_of(home).generators), grad, casting(self.autocast, home):
            return scaled(self.traced[mode], copies, example)

    def _run(self, mode: str, key: _Key) -> Probe:
        traced: Traced = self.traced[mode]
        inputs = _bare(key)
        parts = parts_of(self.roots[mode], traced).to_meta()
        if key != self.example and traced.has_tables:
            self._refuse_other_way(mode, key)
        with self._on_meta(mode):
            found = probe(traced, parts, inputs)
        if key != self.example and not traced.has_tables:
            self._refuse_other_way(mode, key)
        real = self.real[mode].values  # autocast knows no meta device; a dtype does not depend on the size
        if len(real) == len(found.values):
            pairs = zip(found.values, real, strict=True)
            values = tuple(
                dataclasses.replace(ours, dtype=theirs.dtype, writers=_all_writers(ours, theirs))
                for ours, theirs in pairs
            )
            found = dataclasses.replace(found, values=values, refused=self.real[mode].refused | found.refused)
        return found

    @contextlib.contextmanager
    def _on_meta(self, mode: str) -> Iterator[None]:
        """A run on the meta device.

        Raises: PlanError: the model's code wrote to a parameter that the plan takes for unwritten."""
        root = self.roots[mode]
        owned = {name: (p, memory_id(p)) for name, p in root.named_parameters()}
        grad = torch.set_grad_enabled(mode == "train")
        with grad, as_written(), torch.device("meta"), MetaWatch() as watch:
            yield
        moved = {name for name, (p, place) in owned.items() if memory_id(p) != place}
        refuse_written(root, moved, {name for name, (_, place) in owned.items() if place in watch.writes})

    def _refuse_other_way(self, mode: str, key: _Key) -> None:
        """Refuse inputs with which the model's code may go another way than it was seen to go.

        Raises: PlanError: it does, or reads what only a real run could tell."""
        traced = self.traced[mode]
        samples = traced.call.samples_of(_bare(key))
        alike = self._kind(mode, self.example) == self._kind(mode, key)
        if alike and samples in traced.sizes:
            return
        try:
            with self._on_meta(mode):
                traced.extend(self.roots[mode], _bare(key))
        except Exception as error:
            why = (
                f"forward does not go the same way with it, as far as can be told without running it ({error}"
            )
            remedy = "use micro-batches like the example, or trace with one like them"
            raise self._other(key, f"{why}); {remedy}") from error

    def _other(self, key: _Key, why: str) -> PlanError:
        return PlanError(
            f"a micro-batch has shapes {_show(key)}, the example had {_show(self.example)}, and {why}"
        )

    def _kind(self, mode: str, key: _Key) -> object:
        """Conditions of a record beside the number of samples: other sizes, dtypes, and the order of
        strides."""
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
        for value, other in zip(real.values, meta.values, strict=True):
            facts = ("shape", "dtype", "users", "writers")
            if any(getattr(value, fact) != getattr(other, fact) for fact in facts):
                return f"the value {value.name} differs on the meta device"
        return ""


def _all_writers(meta: Value, real: Value) -> tuple[tuple[int, bool], ...]:
    """Those of the real run, unless it lacks one: on the meta device, no write is seen by its bytes."""
    lacks = {writer for writer, _ in meta.writers} - {writer for writer, _ in real.writers}
    return meta.writers if lacks else real.writers


_Key = tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]


def _key(inputs: Sequence[torch.Tensor]) -> _Key:
    return tuple((tuple(x.shape), tuple(x.stride()), x.dtype) for x in inputs)


def _bare(key: _Key) -> list[torch.Tensor]:
    """Tensors of that geometry without memory."""
    return [torch.empty_strided(size, stride, dtype=dtype, device="meta") for size, stride, dtype in key]


def _show(key: _Key) -> str:
    return ", ".join("x".join(map(str, size)) for size, _, _ in key)
