"""The graph of a model that was traced a moment ago in this process: ``Pipeline`` needs it again.

It is taken only for the very model, as long as nothing has changed that a trace could have read; else the
model is traced anew. A model that is gone takes its graph with it."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch import nn

from ...compression.errors import PlanError
from ..autocast import autocast_state
from ..device import CPU
from .dataflow import hooks_on_all_modules
from .guards import Watch
from .layer_graph import LayerGraph
from .object_snapshot import Same, written_kinds
from .verify import on_meta


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    graph: LayerGraph
    watch: Watch
    facts: tuple[Any, ...]


_KNOWN: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def remember(model: nn.Module, graph: LayerGraph) -> None:
    """Keep ``graph``, which was just made of ``model``, with a copy of the model that has no memory."""
    kept = dataclasses.replace(graph, model_copy=on_meta(graph.model_copy))
    _KNOWN[model] = _Known(kept, Watch(model, (), read=lambda _, name: name != "training"), _facts(model))


def recalled(model: nn.Module) -> LayerGraph | None:
    """What was traced of ``model`` last, where nothing has changed since that a trace could read."""
    known = _KNOWN.get(model)
    if known is None or _facts(model) != known.facts:
        return None
    graph = known.graph
    if any(read.changed() for traced in (graph.train, graph.eval) for read in traced.outside):
        return None
    try:
        known.watch.check()
    except PlanError:
        return None
    return graph


def _facts(model: nn.Module) -> tuple[Any, ...]:
    """What a Watch leaves to its user: flags, code, where tensors lie, and how torch is set."""
    modules = list(model.modules())
    tensors = [*model.parameters(), *model.buffers()]
    return (
        [module.training or not model.training for module in modules],
        [
            {name: Same(part) for name, part in vars(kind).items() if part is not None}
            for kind in {k: 0 for m in modules for k in written_kinds(m)}
        ],
        hooks_on_all_modules(),
        [(t.requires_grad, t.shape, t.dtype, t.layout) for t in tensors],
        [(t.stride(), t.data_ptr()) for t in tensors if t.layout is torch.strided],
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        [autocast_state(at) for at in {CPU: None} | {t.device: None for t in tensors if not t.is_meta}],
    )
