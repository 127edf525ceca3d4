"""A lock on a folder that dies with its process, so that two runs never write into one folder.

An advisory ``flock``: the kernel drops it however the process ends. Ranks and other programs that the process
starts do not inherit it; the file names its holder for the one who is refused."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from ...compression.errors import ConfigError
from ...stages.files import reason

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
_HOLDER = re.compile(rb"pid \d+ on [\w.-]+")


@contextlib.contextmanager
def held(path: Path) -> Iterator[str | None]:
    """Make the file ``path`` and its folder, and hold it for the block; an empty folder goes with it.

    Returns: what to tell a person where the file system has no locks; None where it does.
    Raises:  ConfigError: another process holds it. OSError: the folder or its lock cannot be made.
    """
    file, missing = _open(path)
    try:
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the name of its holder
            os.truncate(file, 0)
            os.write(file, f"pid {os.getpid()} on {socket.gethostname()}".encode())
        yield missing
    finally:
        with contextlib.suppress(OSError):
            if _is(file, path):
                path.unlink()  # while it is held: who opened it before sees that it is gone
            path.parent.rmdir()
        os.close(file)


def _open(path: Path) -> tuple[int, str | None]:
    """Return the open and locked file, and what is missing for it to be a lock."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue  # another holder ended, and removed the folder, since it was made
        try:
            missing = _lock(file, path.parent)
            if _is(file, path):
                return file, missing
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # its holder ended, and removed it, after it was opened here


def _lock(file: int, folder: Path) -> str | None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        named = _HOLDER.match(os.pread(file, 400, 0))  # anybody may have written into it
        holder = f", {named[0].decode()}" if named else ""
        raise ConfigError(
            f"hydra.run.dir={folder} is in use by another run{holder}; wait until it ends, or choose another "
            "folder"
        ) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        return f"{folder} is on a file system without locks ({reason(error)}); let no other run write into it"
    return None


def _is(file: int, path: Path) -> bool:
    """True if ``path`` still names the open ``file``."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except OSError:
        return False
