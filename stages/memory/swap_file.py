"""One file without a name, in which a rank keeps its frames, and which of its bytes are lent.

Nothing of the file stays, however the process ends. It is read and written past the page cache where the
file system allows (O_DIRECT), because a page that is kept there takes the memory that the tier is to save.
Extents are aligned, the smallest that fits is lent, and free neighbours are merged.

Source: open(2), O_TMPFILE and O_DIRECT; posix_fallocate(3); best fit with coalescing, Knuth, The Art of
Computer Programming 1, section 2.5.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import errno
import os
import secrets
import shutil
import tempfile
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

from ...compression.errors import ConfigError, StageError
from ..files import FULL, reason
from ..units import is_zero, parse_bytes, show_bytes

UNIT = 4096  # what a file system and O_DIRECT count in


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole units."""
    return -(-num_bytes // UNIT) * UNIT


class Extents:
    """The extents of one file of ``size`` bytes, in which ``lent_bytes`` are lent."""

    def __init__(self) -> None:
        """Start with a file of no bytes."""
        self.size = self.lent_bytes = 0
        self._lent: dict[int, int] = {}  # length by start
        self._free: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}  # of the free ones
        self._by_length: list[tuple[int, int]] = []  # (length, start) of the free ones, in order

    def grow(self, num_bytes: int) -> None:
        """The file is longer by so many bytes, a multiple of ``UNIT``."""
        assert num_bytes % UNIT == 0, "a file grows by whole units"
        self._add(self.size, num_bytes)
        self.size += num_bytes

    def take(self, num_bytes: int) -> int | None:
        """Lend ``num_bytes``, rounded up to units; returns where they begin, None: no room is long enough."""
        needed = aligned(num_bytes)
        place = bisect.bisect_left(self._by_length, (needed, -1))
        if place == len(self._by_length):
            return None
        length, start = self._by_length[place]
        self._remove(start)
        if length > needed:
            self._add(start + needed, length - needed)
        self._lent[start] = needed
        self.lent_bytes += needed
        return start

    def give(self, start: int) -> None:
        """Take back what ``take`` lent, and merge it with the free bytes on both sides."""
        length = self._lent.pop(start, None)
        assert length is not None, "an extent comes back once, by where it begins"
        self.lent_bytes -= length
        self._add(start, length)

    @property
    def tail(self) -> int:
        """Free bytes at the end of the file, which grow with it."""
        start = self._start_of_end.get(self.size)
        return 0 if start is None else self.size - start

    def _add(self, start: int, length: int) -> None:
        if (before := self._start_of_end.get(start)) is not None:
            length += self._remove(before)
            start = before
        if start + length in self._free:
            length += self._remove(start + length)
        self._free[start], self._start_of_end[start + length] = length, start
        bisect.insort(self._by_length, (length, start))

    def _remove(self, start: int) -> int:
        length = self._free.pop(start)
        del self._start_of_end[start + length]
        del self._by_length[bisect.bisect_left(self._by_length, (length, start))]
        return length


_UNNAMED = getattr(os, "O_TMPFILE", 0)  # of Linux
_DIRECT = getattr(os, "O_DIRECT", 0)
_CANNOT_RESERVE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


class Slab:
    """The file; ``direct``: whether it is read and written past the page cache.

    Addresses, places and lengths are multiples of 4,096. Calls from several threads may overlap."""

    def __init__(self, folder: Path, *, direct: bool = True) -> None:
        """Open an empty file in ``folder``.

        Raises:  ConfigError: the folder is none, or takes no file."""
        self.folder, self.direct = folder, bool(direct and _DIRECT)
        try:
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            self._file = self._open()
        except OSError as error:
            raise ConfigError(
                f"the tier disk keeps its file in a folder that can be written, found {folder} "
                f"({reason(error)}); choose another one (memory.path=)"
            ) from error
        self._end = weakref.finalize(self, os.close, self._file)

    def grow(self, size: int, more: int) -> bool:
        """Make a file of ``size`` bytes longer by ``more``; False: there is no space for that.

        Where the file system can, the space is the file's from here on, so that no write finds the disk full.
        """
        try:
            os.posix_fallocate(self._file, size, more)
        except OSError as error:
            if error.errno in FULL:
                with contextlib.suppress(OSError):  # what it had begun to reserve
                    os.ftruncate(self._file, size)
                return False
            if error.errno not in _CANNOT_RESERVE:
                raise
            os.ftruncate(self._file, size + more)
        return True

    def write(self, data: memoryview, at: int) -> int:
        """Write bytes from ``at`` on; returns how many, which may be fewer."""
        return os.pwrite(self._file, data, at)

    def read(self, data: memoryview, at: int) -> int:
        """Fill ``data`` with the bytes from ``at`` on; returns how many, which may be fewer."""
        return os.preadv(self._file, [data], at)

    def write_all(self, data: memoryview, at: int) -> None:
        """Write all of ``data``, however little the system takes at a time."""
        self._whole(self.write, data, at)

    def read_all(self, data: memoryview, at: int) -> None:
        """Fill all of ``data``, however little the system gives at a time."""
        self._whole(self.read, data, at)

    def close(self) -> None:
        """Close the file, which frees its space; once."""
        self._end()

    def _whole(self, move: Callable[[memoryview, int], int], data: memoryview, at: int) -> None:
        done, unit = 0, UNIT if self.direct else 1
        while done < len(data):
            moved = move(data[done:], at + done) // unit * unit
            if moved <= 0:
                raise OSError(errno.EIO, f"it moved {done} of {len(data)} bytes and no more")
            done += moved

    def _open(self) -> int:
        """The descriptor of a file that has no name, past the page cache if that can be had."""
        if self.direct:
            try:
                return self._unnamed(_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            self.direct = False
        return self._unnamed(0)

    def _unnamed(self, flags: int) -> int:
        if _UNNAMED:
            with contextlib.suppress(OSError):  # not every file system has it
                return os.open(self.folder, os.O_RDWR | os.O_CLOEXEC | _UNNAMED | flags, 0o600)
        path = self.folder / f".penstock_slab_{secrets.token_hex(8)}"
        try:
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)
        finally:
            path.unlink(missing_ok=True)  # one that cannot be opened so may have been made all the same


def worded(error: BaseException, what: str, folder: Path) -> BaseException:
    """What to raise for ``error`` of a thread: one sentence with ``what`` where the system refused."""
    if not isinstance(error, OSError):
        return error
    full = error.errno in FULL
    remedy = "free space there, bound what goes there (memory.disk=)" if full else "look at that disk"
    said = StageError(
        f"a frame of {what} the disk of {folder}, found {reason(error)}; {remedy}, or choose another folder "
        "(memory.path=)"
    )
    said.__cause__ = error
    return said


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
