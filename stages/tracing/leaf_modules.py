"""Leaves: one layer each beside torch's own modules, by request (``leaves=``), or because it was
compiled.

A leaf runs as it is, whatever it does inside; cuts are between leaves.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ...compression.errors import PlanError
from ..seeds import TURN
from ..torch_private import is_compiled_in_place, optimized_module

Leaf = str | type[nn.Module] | Callable[..., Any]


def is_compiled(module: nn.Module) -> bool:
    """Return whether it came from ``torch.compile(module)``, or was compiled in place by
    ``module.compile()``."""
    kind = optimized_module()
    return (kind is not None and isinstance(module, kind)) or is_compiled_in_place(module)


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """The block in which compiled pieces run as they were written: shapes and identities are the same, and
    none of the few versions that torch keeps of a compiled function is spent on tensors without memory.

    One thread at a time: torch has one stance for all, and of two that overlap the last would keep it."""
    if optimized_module() is None:
        yield
        return
    with TURN, torch.compiler.set_stance("force_eager"):
        yield


def chosen_leaves(
    model: nn.Module, leaves: Iterable[Leaf]
) -> tuple[dict[str, str], dict[str, Callable[..., Any]]]:
    """The modules of ``model`` by path, and functions by dotted name, that ``leaves`` names; each with why.

    Args:    leaves: classes of modules (or their names), paths of modules, functions (or their dotted names:
             only among what is imported already, since a plan may name them).
    Raises:  PlanError: one names nothing of the model.
    """
    if isinstance(leaves, str) or not isinstance(leaves, Iterable):
        raise PlanError(
            f"leaves is a list of classes, module paths and functions, found {leaves!r}; wrap it: [...]"
        )
    modules: dict[str, str] = {}
    functions: dict[str, Callable[..., Any]] = {}
    paths = dict(model.named_modules())
    for leaf in leaves:
        found = [path for path, module in paths.items() if _is_meant(leaf, path, module)]
        if found == [""]:
            raise PlanError(
                f"the whole model as one leaf is one layer, which no cut divides, found {leaf!r} in leaves"
            )
        if found:
            modules |= {path: "by request" for path in found if path}
        elif function := _function(leaf):
            functions[f"{function.__module__}.{function.__qualname__}"] = function
        else:
            raise _unknown(leaf, paths)
    for path in modules:
        if isinstance(paths[path], nn.ModuleList | nn.ModuleDict):
            raise PlanError(
                f"{path} is a {type(paths[path]).__name__}, which nobody calls; name the modules in it"
            )
    return modules, functions


def _is_meant(leaf: Leaf, path: str, module: nn.Module) -> bool:
    kind = type(module)
    if isinstance(leaf, str):
        return leaf in (path, kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return isinstance(leaf, type) and isinstance(module, leaf)


def _function(leaf: Leaf) -> Callable[..., Any] | None:
    if isinstance(leaf, str):
        home, _, name = leaf.rpartition(".")
        leaf = getattr(sys.modules.get(home), name, None)  # type: ignore[assignment]
    ours = callable(leaf) and not isinstance(leaf, type | nn.Module)
    return leaf if ours and hasattr(leaf, "__qualname__") else None  # type: ignore[return-value]


def _unknown(leaf: object, paths: Mapping[str, nn.Module]) -> PlanError:
    known = [*dict.fromkeys(type(module).__name__ for module in paths.values()), *filter(None, paths)]
    name = leaf if isinstance(leaf, str) else getattr(leaf, "__name__", repr(leaf))
    near = difflib.get_close_matches(str(name), known, n=3) or known[1:6]
    return PlanError(
        f"leaves names classes and paths of the model's modules, or functions that are imported, found "
        f"{name!r}; it has {', '.join(near)}"
    )
