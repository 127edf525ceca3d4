"""How a rank moves what is not read right now: how far ahead in the program, and within which bytes."""

from __future__ import annotations

import dataclasses

from ...compression.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """What a rank does with what leaves it for a while; no bit hangs on it, and ranks may differ.

    ``prefetch_layers``: what is read within so many layers of the program is brought back;
    ``writeout_layers``: what is not read within so many leaves. None: as far ahead as is of use.
    Raises:  ConfigError: not a count."""

    prefetch_layers: int | None = None
    writeout_layers: int | None = None

    def __post_init__(self) -> None:
        for name in ("prefetch_layers", "writeout_layers"):
            found = getattr(self, name)
            if found is not None and (type(found) is not int or found < 0):
                raise ConfigError(f"{name} counts layers from 0, or is None, found {found!r}; use 0 or more")


NO_OPTIONS = MemoryOptions()
