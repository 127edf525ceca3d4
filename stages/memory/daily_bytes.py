"""How much was written to a disk today: flash wears by what is written to it, so a day may have its cap.

The count of a folder that a person named outlives the process, and is shared by all that write there."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

from ..files import reason

COUNT_FILE = "penstock_written_today.json"
_STEP = 64 << 20  # bytes from one look into the file to the next


def today() -> str:
    """The date here."""
    return datetime.date.today().isoformat()


class DailyBytes:
    """Counts what is written on a day, against ``cap`` bytes; None: no cap, and nothing is kept."""

    def __init__(self, cap: int | None, *, path: Path | None, day: Callable[[], str] = today) -> None:
        """Count in the file at ``path`` with others; None: in this process alone.

        Raises:  OSError: the file cannot be written."""
        self.cap, self._path, self._day = cap, path if cap is not None else None, day
        self._date, self._known, self._mine = day(), 0, 0  # bytes in the file, and of ours not yet there
        self._told = False
        self.flush()

    @property
    def num_bytes(self) -> int:
        """Bytes written today, as far as they are known here."""
        return self._known + self._mine

    def allows(self, num_bytes: int) -> bool:
        """Whether so many bytes more stay within the cap of today."""
        if self.cap is None:
            return True
        if self._date != (date := self._day()):
            self._date, self._known, self._mine = date, 0, 0
        return self.num_bytes + num_bytes <= self.cap

    def add(self, num_bytes: int) -> None:
        """So many bytes were given to the disk."""
        self._mine += num_bytes
        if self._mine >= _STEP:
            self.keep()

    def keep(self) -> None:
        """Add ours to the file; where that refuses, which is told once, they are counted here alone."""
        try:
            self.flush()
        except OSError as error:
            if not self._told:
                said = f"the bytes of a day cannot be kept in {self._path} ({reason(error)})"
                warnings.warn(f"{said}; those of other processes are not known", stacklevel=2)
            self._told = True

    def flush(self) -> None:
        """Add ours to the file, and learn what others wrote."""
        if self._path is None:
            return
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            known = _read(file, self._date) + self._mine
            content = json.dumps({"day": self._date, "bytes": known}).encode()
            os.pwrite(file, content, 0)
            os.ftruncate(file, len(content))
            self._known, self._mine = known, 0
        finally:
            os.close(file)


def _read(file: int, date: str) -> int:
    """The bytes of ``date`` in a file; 0 where it speaks of another day, or says nothing that was meant."""
    with contextlib.suppress(ValueError):
        content = json.loads(os.pread(file, 1 << 12, 0) or b"null")
        found = content.get("bytes") if isinstance(content, dict) and content.get("day") == date else 0
        return found if isinstance(found, int) and found > 0 else 0
    return 0
