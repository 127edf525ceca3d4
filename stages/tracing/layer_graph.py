"""LayerGraph: what ``trace`` found of a model, and how a person sees it."""

from __future__ import annotations

import dataclasses
import textwrap
import weakref
from typing import Any

import torch
from torch import nn

from .aliases import Groups
from .dataflow import Probe
from .guards import traced_state
from .layers import Traced
from .meta_model import on_meta

SHOWN = 12  # names of a list that has more are its first and last ones


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerGraph:
    """A recorded model: its two runs, the probe of each at the example's shape, the copy they ran on.

    ``shared``: in the train and in the eval run the tensors that share memory, with the layers that need
    them: all on one stage. ``written``: the buffers that a forward in train mode writes to. ``model``: the
    one that was traced; ``state``: all that the trace could read of it.

    A plan carries it to the ``Pipeline`` of its process, without memory; the plan's JSON does not have it."""

    train: Traced
    eval: Traced
    train_probe: Probe
    eval_probe: Probe
    model_copy: nn.Module
    example_inputs: tuple[torch.Tensor, ...]
    fingerprint: str
    shared: tuple[Groups, Groups]
    autocast: torch.dtype | None
    written: frozenset[str]
    model: weakref.ref[nn.Module]
    state: tuple[Any, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in the order in which they run."""
        return tuple(layer.name for layer in self.train.layers)

    def without_memory(self) -> LayerGraph:
        """Return the same graph around a copy of the model on the meta device."""
        return dataclasses.replace(self, model_copy=on_meta(self.model_copy))

    def fits(self, model: nn.Module) -> bool:
        """Return whether ``model`` is the one that was traced, and nothing that a trace reads has changed."""
        guards = (guard for traced in (self.train, self.eval) for guard in traced.guards)
        return (
            self.model() is model
            and traced_state(model) == self.state
            and not any(guard.difference() for guard in guards)
        )

    def __str__(self) -> str:
        """A summary: its call, what may be cut, what is one layer and why, what was left out, the layers."""
        call, refused = self.train.call, self.train_probe.refused
        inputs = [
            f"{name} {'x'.join(map(str, x.shape))} {str(x.dtype).removeprefix('torch.')}{' whole' * whole}"
            for name, x, whole in zip(call.names, self.example_inputs, call.whole, strict=True)
        ]
        reasons = {reason: self.layers[cut] for cut, reason in reversed(refused.items())}
        sections = {
            "called with": inputs,
            "cuts": [
                f"allowed behind {len(self.layers) - 1 - len(refused)} of {len(self.layers) - 1} layers"
            ],
            "no cut": [f"behind {name}: {reason}" for reason, name in list(reversed(reasons.items()))[:3]],
            "one layer": _some([f"{name} ({why})" for name, why in self.train.leaves.items()]),
            "left out": [f"{name}, which no stage could put together again" for name in self.train.dropped],
            "held to": [f"the example's number of samples: {self.train.fixed}"] if self.train.fixed else [],
            "layers": [", ".join(_some(list(self.layers)))],
        }
        name = type(self.model_copy).__name__
        title = f"{name}: {len(self.layers)} layers, {len(self.eval.layers)} in eval mode"
        rows = [_row(heading, text) for heading, texts in sections.items() for text in texts]
        return "\n".join([title, *rows])


def _some(items: list[str]) -> list[str]:
    """All of a short list; of a long one its ends."""
    half = SHOWN // 2
    if len(items) <= SHOWN:
        return items
    return [*items[:half], f"... {len(items) - SHOWN} more ...", *items[-half:]]


def _row(heading: str, text: str) -> str:
    start = f"  {heading:<12}"
    return textwrap.fill(text, 110, initial_indent=start, subsequent_indent=" " * len(start))
