"""What a container's forward reads of its modules while torch.fx traces it: that much is part of the graph.

The trace runs again on a copy whose modules note every attribute that is asked for; what nobody asked for
can change without changing the graph."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn

from ..compression.errors import PlanError
from .layers import Traced
from .leaves import defaults_of


class _Again(fx.Tracer):
    """The tracer whose leaves are those of a trace that was made."""

    def __init__(self, leaves: Iterable[str]) -> None:
        super().__init__()
        self.leaves = frozenset(leaves)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Whether a call of the module becomes one node."""
        return module_qualified_name in self.leaves or super().is_leaf_module(m, module_qualified_name)


def reads_of(root: nn.Module, traced: Traced) -> set[tuple[str, str]]:
    """(path of a module, name of an attribute) for all that is read while ``root`` is traced once more.

    Args:    root: a copy of the model as it was when ``traced`` was made; it may lie on the meta device."""
    root = copy.deepcopy(root)
    reads: set[tuple[str, str]] = set()
    leaves = {str(layer.node.target) for layer in traced.layers if layer.node.op == "call_module"}
    for path, module in root.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            module.__class__ = _noting(type(module), path, reads)
    tracer, defaults = _Again(leaves), defaults_of(root, len(traced.inputs))
    reads.clear()
    try:
        with torch.random.fork_rng(devices=[]):
            tracer.trace(root, defaults or None)
    except Exception as error:
        raise PlanError(
            f"modules were set in another way after Pipeline(...), and that the trace does not depend on it "
            f"cannot be shown ({type(error).__name__}: {error}); set them back, or make the Pipeline anew"
        ) from error
    return set(reads)


def _noting(kind: type[nn.Module], path: str, reads: set[tuple[str, str]]) -> type[nn.Module]:
    """The class ``kind`` for one module, noting what is read of it."""

    def note(self: nn.Module, name: str) -> Any:
        reads.add((path, name))
        return kind.__getattribute__(self, name)

    named = {"__getattribute__": note, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), named)
