"""Which attributes of its modules a run reads by itself: what nobody read may change later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn


@contextlib.contextmanager
def noting(
    paths: Mapping[nn.Module, str],
    leaf: Callable[[str, nn.Module], bool],
    note: Callable[[tuple[str, str]], None],
) -> Iterator[None]:
    """The block in which ``note`` is told (path, attribute) of what is read of modules outside of layers."""
    inside = "."  # of the last layer: modules are told depth first
    kinds: dict[nn.Module, type[nn.Module]] = {}
    for module, path in paths.items():
        if path and leaf(path, module):
            inside = f"{path}."
        elif not path.startswith(inside):
            kinds[module] = type(module)
    try:
        for module, kind in kinds.items():
            module.__class__ = _noted(kind, paths[module], note)
        yield
    finally:
        for module, kind in kinds.items():
            module.__class__ = kind


def _noted(kind: type[nn.Module], path: str, note: Callable[[tuple[str, str]], None]) -> type[nn.Module]:
    """The class ``kind`` for one module of a copy, noting what is read of it."""

    def read(self: nn.Module, name: str) -> Any:
        note((path, name))
        return kind.__getattribute__(self, name)

    named = {"__getattribute__": read, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), named)
