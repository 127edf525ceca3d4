"""One file without a name, in which a rank keeps its frames: nothing of it stays, however the process ends.

It is read and written past the page cache where the file system allows (O_DIRECT), because a page that is
kept there takes the memory that the tier is to save.
Source: open(2), O_TMPFILE and O_DIRECT; posix_fallocate(3).
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path

from ...compression.errors import ConfigError, StageError
from ..files import FULL, reason
from .extents import UNIT

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
