"""Folders for the time of one run, in the directory for temporary files.

The process that makes one holds a lock on it, which ends with the process however that ends. So the next run
on the machine takes away what a killed one has left, where the file system has locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "penstock_run_"
SECONDS = 60
"""From this age on a folder without a lock is left over, and not one that is being made."""


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Yield a folder that only this user may enter; it goes with the block.

    Raises:
        OSError: The directory for temporary files (TMPDIR) takes none.
    """
    _sweep(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as path:
        folder = os.open(path, os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(folder, fcntl.LOCK_EX)
            yield Path(path)
        finally:
            os.close(folder)


def _sweep(directory: Path) -> None:
    """Remove the folders of this user that nobody holds any more."""
    for path in directory.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process sweeps, or it is another user's
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                found = os.fstat(folder)
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > SECONDS:
                    shutil.rmtree(path)
            finally:
                os.close(folder)
