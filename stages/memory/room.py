"""Room for a frame on disk: in the file, behind its end, or, by budget, nowhere.

Source: claims A5 and A6 of CN115016937A (what is idle leaves the memory)."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import warnings
from pathlib import Path

from ..units import is_zero, parse_bytes, show_bytes
from .extents import UNIT, Extents, aligned
from .slab import Slab

STEP_BYTES = 64 << 20  # by which the file grows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiskOptions:
    """What the tier ``disk`` of a rank may use.

    ``path``: the folder of its file; None: the one for temporary files. ``budget``: the most bytes of the
    file, as ``"20GiB"``, 0: nothing goes there; None: no limit."""

    path: str | Path | None = None
    budget: int | str | None = None

    @property
    def allowed(self) -> bool:
        """Whether anything may go there."""
        return self.budget is None or not is_zero(self.budget)


ANYWHERE = DiskOptions()


class Room:
    """The places in one slab; who calls it holds the lock of the disk."""

    def __init__(self, slab: Slab, options: DiskOptions) -> None:
        """Start with an empty slab.

        Raises:  PlanError: no size in bytes."""
        self.slab, self._extents = slab, Extents()
        self._budget = None if options.budget is None else parse_bytes(options.budget, name="memory.disk")
        self._is_full = self._told = False

    @property
    def lent_bytes(self) -> int:
        """Bytes that hold a frame."""
        return self._extents.lent_bytes

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._extents.size

    @property
    def takes(self) -> bool:
        """Whether there is some, as far as is known."""
        return not self._is_full

    def take(self, num_bytes: int) -> int | None:
        """Offset at which ``num_bytes`` may be written; None: nowhere, which is told once."""
        needed = aligned(num_bytes)
        start = self._extents.take(needed)
        refusal = self._grow(needed) if start is None else ""
        if start is None and not refusal:
            start = self._extents.take(needed)
        if refusal:
            self._is_full, told, self._told = True, self._told, True
            if not told:
                warnings.warn(f"{refusal}; what finds no room stays in memory, packed", stacklevel=4)
        return start

    def give(self, start: int) -> None:
        """Take back a place."""
        self._extents.give(start)
        self._is_full = False

    def _grow(self, needed: int) -> str:
        """Make the file longer, so that ``needed`` bytes follow each other; returns why not."""
        least = needed - self._extents.tail
        most = max(least, STEP_BYTES)
        if self._budget is not None:
            most = min(most, (self._budget - self._extents.size) // UNIT * UNIT)
        refused = f"the tier disk has no room for {show_bytes(needed)} more in {self.slab.folder}"
        if most < least:
            return f"{refused} within memory.disk={show_bytes(self._budget or 0)}"
        for more in sorted({most, least}, reverse=True):
            if self.slab.grow(self._extents.size, more):
                self._extents.grow(more)
                return ""
        return f"{refused}, where {show_bytes(shutil.disk_usage(self.slab.folder).free)} are free"


def folder_of(options: DiskOptions) -> Path:
    """The folder of the file."""
    return Path(tempfile.gettempdir() if options.path is None else options.path)
