"""Records of other micro-batch sizes: shapes and identities without memory or computation, on the meta
device.

A rank that holds only its own layers cannot run the whole network any more, but it must know what every
stage sends for a micro-batch of any size: identities can depend on it (a contiguous() of one sample does
nothing).

Where the meta device tells a model's shapes otherwise than a real run (attention kernels lay their results
out otherwise there, experts chosen by value have no shape at all), every other size is refused here, and
whoever asks records the model anew."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch

from ...compression.errors import PlanError
from ..meta_watch import MetaWatch
from ..torch_private import memory_id
from .dataflow import Probe, Value, probe
from .layers import Traced, parts_of
from .meta_model import on_meta
from .model_checks import as_written
from .tracer import LayerGraph
from .verify import refuse_written

KEPT = 256  # records; texts of varying length would make ever more


class Shapes:
    """Records of both traces at any micro-batch size; that of the example comes from the real run."""

    def __init__(self, graph: LayerGraph) -> None:
        self.traced = {"train": graph.train, "eval": graph.eval}
        self.real = {"train": graph.train_probe, "eval": graph.eval_probe}
        self.example, self.autocast = _key(graph.example_inputs), graph.autocast
        self.roots = {"train": on_meta(graph.model_copy), "eval": on_meta(graph.model_copy).eval()}
        self.known: dict[tuple[str, object], Probe] = {}
        self.differences = {
            mode: traced.fixed or self._difference(mode) for mode, traced in self.traced.items()
        }

    def probe(self, mode: str, inputs: Sequence[torch.Tensor]) -> Probe:
        """The record of ``mode`` ("train" or "eval") for inputs of these shapes.

        Raises: PlanError: the model's shapes cannot be followed, or it does not take such a micro-batch."""
        key = _key(inputs)
        if key == self.example:
            return self.real[mode]
        if (mode, key) not in self.known:
            if reason := self.differences[mode]:
                raise self._other(key, f"this model's shapes cannot be told without running it ({reason})")
            try:
                found = self._run(mode, key)
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

    def _run(self, mode: str, key: _Key) -> Probe:
        traced: Traced = self.traced[mode]
        inputs = _bare(key)
        parts = parts_of(self.roots[mode], traced).to_meta()
        with self._on_meta(mode):
            found = probe(traced, parts, inputs)
        if key != self.example:
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
                traced.check_same(self.roots[mode], _bare(key))
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
