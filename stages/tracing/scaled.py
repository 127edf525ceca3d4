"""Records of a run at any number of samples, from real runs at a few: for models whose shapes the meta device
does not tell (attention kernels lay their results out otherwise there, experts chosen by value have no shape
at all).

Every size in a shape is affine in the number of samples, or the record holds for the sizes that ran alone.
One sample is a case of its own: a ``contiguous()`` of it does nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import nn

from ...compression.errors import PlanError
from .capture.affine import Affine, affine_of, at_size
from .capture.data import resized
from .layers import Traced, parts_of
from .probe import Probe, probe


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
