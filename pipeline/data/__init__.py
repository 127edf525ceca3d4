"""The data sets by name; a user's own is any callable that returns a ``Samples``.

Names are resolved when they are asked for: ``options.py`` refuses missing files before torch is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .samples import Description as Description
    from .samples import Samples as Samples

__all__ = ["Description", "Samples"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import samples

    return getattr(samples, name)
