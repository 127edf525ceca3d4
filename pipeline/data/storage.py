"""Places of a data set's files for all ranks: one storage that each of them reads, or local copies."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...compression.errors import ConfigError
from ...stages.files import reason

PLACES = ("root", "path")
"""The options of our data sets that name a folder or a file."""

_TOKEN = ".penstock_token_"
Gather = Callable[[Any], list[Any]]  # everybody's item, by rank


def place_of(options: Mapping[str, Any]) -> tuple[str, Path] | None:
    """Return the option of a data set that names its files, and where they are; None where none does."""
    named = [(name, Path(options[name])) for name in PLACES if isinstance(options.get(name), str)]
    return next((item for item in named if item[1].exists()), None)


def check_shared(options: Mapping[str, Any], *, rank: int, gather: Gather) -> None:
    """Refuse, on every rank, files that are not the same for all ranks; collective.

    What rank 0 writes beside them all must read; where it may not write, names and sizes must agree."""
    found = place_of(options)
    name, where = found or (PLACES[0], Path(str(options.get(PLACES[0]))))
    token = (where if where.is_dir() else where.parent) / f"{_TOKEN}{uuid.uuid4().hex}"
    try:
        written = None
        if rank == 0 and found:
            with contextlib.suppress(OSError):  # a folder that is only read has no token
                token.touch()
                written = token.name
        written = gather(written)[0]
        seen = gather(os.path.exists(token.with_name(written)) if written else found and listing(where))
    finally:
        if rank == 0:
            with contextlib.suppress(OSError):
                token.unlink()
    if odd := [str(rank) for rank, one in enumerate(seen) if one != seen[0]]:
        raise ConfigError(
            f"data.{name}={where} is not the same storage for all ranks: rank {', '.join(odd)} does not find "
            "there what rank 0 does; mount one storage on all machines, or have copies by data.local=PATH"
        )


def local_copy(options: Mapping[str, Any], local: str) -> dict[str, Any]:
    """Return the options of a data set whose files were copied below ``local``, once for all who ask.

    Where files were added, removed or changed, they are copied anew."""
    found = place_of(options)
    if found is None:
        raise ConfigError(
            f"data.local={local} copies what data.root= or data.path= names, and there is none; drop "
            "data.local="
        )
    name, where = found
    try:
        source = hashlib.blake2b(os.fsencode(where.resolve()), digest_size=4).hexdigest()
        copy = Path(local) / f"{where.name}-{source}-{listing(where, times=True)}"
        copy.parent.mkdir(parents=True, exist_ok=True)
        with (copy.parent / ".penstock_lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not copy.exists():  # copied whole or not at all
                with tempfile.TemporaryDirectory(dir=copy.parent, prefix=".penstock_part_") as part:
                    whole = Path(part) / "whole"
                    if where.is_dir():
                        shutil.copytree(where, whole, ignore=shutil.ignore_patterns(f"{_TOKEN}*"))
                    else:
                        shutil.copy2(where, whole)
                    whole.rename(copy)
    except OSError as error:
        why = error if isinstance(error, shutil.Error) else reason(error)
        raise ConfigError(f"data.local={local}: {where} cannot be copied there ({why})") from error
    return dict(options) | {name: str(copy)}


def listing(where: Path, *, times: bool = False) -> str:
    """Return a digest of the names and sizes of all files there, of their times as well if asked."""
    digest = hashlib.blake2b(digest_size=16)
    top = where if where.is_dir() else where.parent
    for folder, _, names in [(top, [], [where.name])] if where.is_file() else sorted(os.walk(where)):
        for name in sorted(name for name in names if not name.startswith(_TOKEN)):
            file = Path(folder, name)
            status = file.stat()
            time = f"{status.st_mtime_ns}\0" if times else ""
            text = f"{file.relative_to(top)}\0{status.st_size}\0{time}"
            digest.update(text.encode(errors="surrogateescape"))
    return digest.hexdigest()
