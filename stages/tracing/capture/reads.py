"""Which attributes of its modules a run reads by itself: what nobody read may change later."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn


class Noting(Protocol):
    """Who wants to know, and whether a layer runs now, whose reads are its own."""

    quiet: int
    reads: set[tuple[str, str]]


def noting(kind: type[nn.Module], path: str, recorder: Noting) -> type[nn.Module]:
    """The class ``kind`` for one module of a copy, noting what is read of it."""

    def note(self: nn.Module, name: str) -> Any:
        if not recorder.quiet:
            recorder.reads.add((path, name))
        return kind.__getattribute__(self, name)

    named = {"__getattribute__": note, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), named)
