"""Which attributes of its modules a run reads by itself: what nobody read may change later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import nn


class NotesReads(Protocol):
    """Who wants to know; ``quiet``: a layer runs now, whose reads are its own."""

    quiet: int
    reads: set[tuple[str, str]]
    paths: dict[nn.Module, str]
    leaf: Callable[[str, nn.Module], bool]


@contextlib.contextmanager
def noting(recorder: NotesReads) -> Iterator[None]:
    """The block in which attributes that the run reads by itself, outside of the layers, are noted."""
    layers: list[str] = []
    kinds: dict[nn.Module, type[nn.Module]] = {}
    for module, path in recorder.paths.items():
        if path and recorder.leaf(path, module):
            layers.append(f"{path}.")
        elif not path.startswith(tuple(layers)):
            kinds[module] = type(module)
    try:
        for module, kind in kinds.items():
            module.__class__ = _noted(kind, recorder.paths[module], recorder)
        yield
    finally:
        for module, kind in kinds.items():
            module.__class__ = kind


def _noted(kind: type[nn.Module], path: str, recorder: NotesReads) -> type[nn.Module]:
    """The class ``kind`` for one module of a copy, noting what is read of it."""

    def note(self: nn.Module, name: str) -> Any:
        if not recorder.quiet:
            recorder.reads.add((path, name))
        return kind.__getattribute__(self, name)

    named = {"__getattribute__": note, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), named)
