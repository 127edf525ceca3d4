"""Files that are there whole or not at all: written as ``NAME.*.part``, and renamed when they are whole; and
one sentence where the file system refuses them."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..compression.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
REMEDIES = {
    **dict.fromkeys(FULL, "free space there"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable"),
    **dict.fromkeys((errno.ENOENT, errno.ESTALE), "leave its folder where it is"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.EISDIR), "move what stands in its way"),
    errno.ENAMETOOLONG: "shorten its name",
}


_PART = re.compile(r".+\.[0-9a-f]{8}\.part", re.DOTALL)


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[Path]:
    """Write a file whole or not at all: the block writes to the path that it gets, which then takes the name.

    Raises: ConfigError: the file system refuses; a former file stays."""
    target = Path(os.path.realpath(path))
    part = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")
    with refusing(path):
        if target.exists() and not target.is_file() and not target.is_dir():
            yield target  # a device or a pipe has no whole
            return
        try:
            yield part
            sync(part)
            part.replace(target)
            sync(target.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise


def open_regular(path: str | Path, *, most: int | None = None) -> io.BufferedReader:
    """Open a file to read it, but no pipe or device, which may not end, nor one of over ``most`` bytes."""
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    found = os.fstat(file.fileno())
    if stat.S_ISREG(found.st_mode) and (most is None or found.st_size <= most):
        return file
    file.close()
    if stat.S_ISREG(found.st_mode):
        raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes of {most:,} at most")
    raise OSError(errno.EINVAL, "it is no regular file")


def sync(path: Path) -> None:
    """Have the disk keep a file's bytes, or a folder's names: the bytes first, then what leads to them."""
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EACCES):  # a folder that cannot be told, or not by us
            raise


@contextlib.contextmanager
def refusing(path: str | Path) -> Iterator[None]:
    """Turn what the file system refuses into one sentence, a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({reason(error)}); {remedy(error)}") from error


def reason(error: OSError) -> str:
    """Return what the file system said."""
    return error.strerror or str(error)


def remedy(error: OSError) -> str:
    """Return what a person can do about it."""
    first = REMEDIES.get(error.errno or 0, "see to it")
    return f"{first}, or choose another folder (a run's is hydra.run.dir=)"


def save_json(path: str | Path, content: Mapping[str, Any], *, indent: int = 2) -> None:
    """Write JSON, whole or not at all."""
    text = json.dumps(content, indent=indent, allow_nan=False)
    with writing(path) as part:
        part.write_text(f"{text}\n", encoding="utf-8")


def save_picture(path: str | Path, figure: Figure) -> None:
    """Write a figure as a PNG, whole or not at all."""
    with writing(path) as part:
        figure.savefig(part, format="png", dpi=160)


def remove_parts(folder: Path) -> None:
    """Remove what writers that were killed left in ``folder``; other programs' ``.part`` files stay."""
    for path in folder.glob("*.part"):
        if _PART.fullmatch(path.name):
            path.unlink(missing_ok=True)
