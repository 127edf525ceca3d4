"""How a rank moves what is not read right now: how far ahead in the program, and within which bytes."""

from __future__ import annotations

import dataclasses

from ...compression.errors import ConfigError
from ..units import parse_bytes

NEAR = 4  # layers: "auto"; what is read within so many is brought back, and need not leave


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """What a rank does with what leaves it for a while; no bit hangs on it, and ranks may differ.

    ``prefetch_layers``: what is read within so many layers of the program is brought back;
    ``writeout_layers``: what is not read within so many leaves. None: as far ahead as is of use.
    ``host``: the most bytes of the tier ``host``, as ``"8GiB"``; None: no limit.
    Raises:  ConfigError: not a count. PlanError: no size in bytes."""

    prefetch_layers: int | None = None
    writeout_layers: int | None = None
    host: int | str | None = None

    def __post_init__(self) -> None:
        for name in ("prefetch_layers", "writeout_layers"):
            found = getattr(self, name)
            if found is not None and (type(found) is not int or found < 0):
                raise ConfigError(f"{name} counts layers from 0, or is None, found {found!r}; use 0 or more")
        if self.host is not None:
            parse_bytes(self.host, name="memory.host")

    @property
    def host_bytes(self) -> int | None:
        """The most bytes of the tier ``host``."""
        return None if self.host is None else parse_bytes(self.host, name="memory.host")


NO_OPTIONS = MemoryOptions()
