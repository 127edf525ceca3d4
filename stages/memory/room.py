"""Where on disk there is room for a frame: in the file, behind its end, or, by budget or cap, nowhere.

Source: claims A5 and A6 of CN115016937A (what is idle leaves the memory)."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
import warnings
from pathlib import Path

from ...compression.errors import ConfigError
from ..files import reason
from ..units import is_zero, parse_bytes, show_bytes
from .daily_bytes import COUNT_FILE, DailyBytes
from .extents import UNIT, Extents, aligned
from .slab import Slab

STEP_BYTES = 64 << 20  # by which the file grows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiskOptions:
    """What the tier ``disk`` of a rank may use.

    ``path``: the folder of its file; None: the one for temporary files. ``budget``: the most bytes of the
    file, as ``"20GiB"``, 0: nothing goes there; ``per_day``: the most bytes written on a day; None: no limit.
    ``shared``: the bytes of a day are counted in a file in the folder, with those of other processes and
    runs."""

    path: str | Path | None = None
    budget: int | str | None = None
    per_day: int | str | None = None
    shared: bool = True

    @property
    def allowed(self) -> bool:
        """Whether anything may go there."""
        return self.budget is None or not is_zero(self.budget)


ANYWHERE = DiskOptions()


class Room:
    """The places in one slab; who calls it holds the lock of the disk."""

    def __init__(self, slab: Slab, options: DiskOptions) -> None:
        """Start with an empty slab.

        Raises:  PlanError: no size in bytes. ConfigError: the count of the day cannot be kept."""
        self.slab, self._extents = slab, Extents()
        self._budget = None if options.budget is None else parse_bytes(options.budget, name="memory.disk")
        cap = None
        if options.per_day is not None:
            cap = parse_bytes(options.per_day, name="memory.disk_per_day")
        path = slab.folder / COUNT_FILE if options.shared and options.path is not None else None
        try:
            self.today = DailyBytes(cap, path=path)
        except OSError as error:
            raise ConfigError(
                f"the bytes of a day are counted in {path}, which refuses ({reason(error)}); make it "
                "writable, or leave out memory.disk_per_day="
            ) from error
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
        return not self._is_full and self.today.allows(UNIT)

    def take(self, num_bytes: int, *, soon: int = 0) -> int | None:
        """Where ``num_bytes`` may be written; None: nowhere, which is told once.

        Args:    soon: bytes that are about to be written, so they count as today's."""
        needed, start = aligned(num_bytes), None
        if not self.today.allows(needed + soon):
            cap = show_bytes(self.today.cap or 0)
            refusal = f"disks wear by what is written, and memory.disk_per_day={cap} is reached in "
            refusal += str(self.slab.folder)
        else:
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
