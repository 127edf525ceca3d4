"""Anomaly detection: name the first layer whose output, or gradient, is NaN or infinite.

Infinite outputs may be right (masks are filled with them): they are only noted, and named where something is
refused behind them. Nothing is written or replaced, so no bit changes.
"""

from __future__ import annotations

import cmath
import dataclasses
import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...compression.errors import StageError
from ..torch_private import base_of, is_view, tree_leaves, values_of, version_of
from ..tracing.layers import Layer
from .value_routing import Route

CHECKED = frozenset(
    (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
)

UNWRITTEN = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided", "resize_")
)
"""Functions whose results are memory as it was found."""

_REMEDY = "lower the learning rate, or look at the data of this step"


@dataclasses.dataclass(frozen=True, slots=True)
class Guard:
    """Kind of guard of a stage; ``gradients``: these too, which a loss scale makes overflow by intent."""

    gradients: bool

    def watch(self, received: Mapping[int, Any], route: Route) -> Watch:
        """Return what a forward that begins with ``received`` calls with each layer and its result, and its
        backward; notes what is NaN or infinite in what the stage begins with."""
        watch = Watch(self.gradients)
        for number, item in received.items():
            if not (isinstance(item, torch.Tensor) and item.dtype in CHECKED) or _finite(item):
                continue
            value = route.record.values[number]
            what = "NaN" if int(torch.isnan(item).sum()) else "infinite"
            where = f"the input {value.name}" if value.producer < 0 else f"layer {value.name}"
            watch.note(f"{what} first in {where}")
        return watch

    def check_update(self, named: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        """Refuse an update whose gradients, by the names of their parameters, are not all finite."""
        for name, gradient in named if self.gradients else ():
            if gradient is not None:
                gradient = values_of(gradient) if gradient.layout is torch.sparse_coo else gradient
                _check_gradient(gradient, f"parameter {name}", "")


@dataclasses.dataclass(slots=True, eq=False)
class Watch:
    """Checks one micro-batch of a stage, and holds no tensor; ``first``: a note of what was found first."""

    gradients: bool
    first: str = ""
    unwritten: list[weakref.ref[torch.Tensor]] = dataclasses.field(default_factory=list)

    def note(self, what: str) -> None:
        """Keep the first."""
        self.first = self.first or f", {what}"

    def __call__(self, layer: Layer, result: Any) -> None:
        """Check the ``result`` of ``layer``; StageError if some of it is NaN."""
        for tensor in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if not (isinstance(tensor, torch.Tensor) and tensor.dtype in CHECKED):
                continue
            if not (self.is_unwritten(layer, tensor) or _finite(tensor)):
                if count := int(torch.isnan(tensor).sum()):
                    raise StageError(
                        f"detect_anomaly=true refuses NaN in the output of a layer, found {count} of "
                        f"{tensor.numel()} elements of that of layer {layer.name}{self.first}; {_REMEDY}"
                    )
                self.note(f"infinite first in layer {layer.name}")
            # Of a view whose memory was written to, a look at its node may make that node anew and so earlier
            # than without a guard, which could change the order of additions: the layer before is checked.
            if self.gradients and tensor.requires_grad and not (is_view(tensor) and version_of(tensor)):
                if (node := tensor.grad_fn) is not None:  # else it is a parameter, and the update checks it
                    node.register_prehook(functools.partial(self._check, layer.name, tensor.output_nr))

    def check_loss(self, loss: torch.Tensor) -> None:
        """Refuse a loss (before its scale) that is NaN or infinite."""
        if not _finite(loss):
            raise StageError(
                f"detect_anomaly=true refuses a loss that is not finite, found {loss.item()}{self.first}; "
                f"{_REMEDY}"
            )

    def is_unwritten(self, layer: Layer, tensor: torch.Tensor) -> bool:
        """Return whether nobody may have written to the memory; its first reader is checked."""
        if getattr(layer.node.target, "__name__", "") in UNWRITTEN:
            self.unwritten.append(weakref.ref(tensor))
            return True
        base = base_of(tensor)
        return any(found() is base for found in self.unwritten)

    def _check(self, name: str, place: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
        if (gradient := gradients[place]) is not None:
            _check_gradient(gradient, f"the output of layer {name}", self.first)


def _check_gradient(gradient: torch.Tensor, of: str, first: str) -> None:
    if gradient.dtype in CHECKED and not _finite(gradient):
        nan, infinite = int(torch.isnan(gradient).sum()), int(torch.isinf(gradient).sum())
        raise StageError(
            f"detect_anomaly=true refuses NaN and infinite gradients, found {nan} NaN and {infinite} "
            f"infinite of {gradient.numel()} elements in the gradient of {of}{first}; {_REMEDY}"
        )


def _finite(tensor: torch.Tensor) -> bool:
    if tensor.layout is not torch.strided:
        return True
    tensor = tensor.detach()  # where an element is not finite, neither is the sum, which takes one pass
    return cmath.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())
