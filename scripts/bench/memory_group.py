"""A bound of the memory of a process that the system holds: a cgroup of its own below this process's.

Pages of files count inside it as any other, so that a page cache cannot stand in for a disk. A process that
needs more than it may is killed by the system.
Source: Documentation/admin-guide/cgroup-v1/memory.rst of Linux."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from ...compression.errors import ConfigError
from ...stages.files import reason

ROOT, OWN = Path("/sys/fs/cgroup/memory"), Path("/proc/self/cgroup")
_REMOVAL_SECONDS = 5.0


class MemoryGroup:
    """The folder of a group; whoever is in it stays below its limit."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def enter(self) -> None:
        """Move this process into it; what it held before counts where it was."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()))

    def held_bytes(self) -> int:
        """Bytes that cannot be given up for others: without pages of files that nobody has mapped."""
        lines = (self.path / "memory.stat").read_text().splitlines()
        stat = {name: int(number) for name, number in map(str.split, lines)}
        return self._number("memory.usage_in_bytes") - stat["cache"] + stat["mapped_file"]

    def limit(self, num_bytes: int) -> None:
        """Hold all that is in it below ``num_bytes`` from here on, swap included.

        Raises: MemoryError: it holds more than that already."""
        try:
            (self.path / "memory.limit_in_bytes").write_text(str(num_bytes))
        except OSError as error:
            raise MemoryError(f"it holds more than {num_bytes} bytes already ({reason(error)})") from error
        with contextlib.suppress(OSError):  # only where swap is counted
            (self.path / "memory.memsw.limit_in_bytes").write_text(str(num_bytes))

    def lift(self) -> None:
        """Hold nothing any more."""
        with contextlib.suppress(OSError):  # only where swap is counted
            (self.path / "memory.memsw.limit_in_bytes").write_text("-1")
        (self.path / "memory.limit_in_bytes").write_text("-1")

    @property
    def num_killed(self) -> int:
        """How many processes the system ended because they needed more."""
        lines = (self.path / "memory.oom_control").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def _number(self, name: str) -> int:
        return int((self.path / name).read_text())


@contextlib.contextmanager
def memory_group(*, root: Path = ROOT, own: Path = OWN) -> Iterator[MemoryGroup]:
    """A new group below the one that this process is in; gone with the block, when whoever is in it ended.

    Raises: ConfigError: this machine, or its administrator, has none to give."""
    path = _parent(root, own) / f"penstock_{secrets.token_hex(8)}"
    try:
        path.mkdir()
    except OSError as error:
        raise ConfigError(
            f"a limit is held by a memory cgroup, and {path.parent} takes none ({reason(error)}); run as "
            "whoever may make one, or drop limits="
        ) from error
    try:
        yield MemoryGroup(path)
    finally:
        _remove(path)


def why_not(*, root: Path = ROOT, own: Path = OWN) -> str | None:
    """Why no limit can be held here; None: one can."""
    try:
        with memory_group(root=root, own=own):
            return None
    except ConfigError as error:
        return str(error)


def _parent(root: Path, own: Path) -> Path:
    lines = own.read_text().splitlines() if own.exists() else []
    groups = (line.split(":", 2) for line in lines)
    below = next((path for _, names, path in groups if "memory" in names.split(",")), None)
    if below is None or not (root / "memory.limit_in_bytes").exists():
        raise ConfigError(
            f"a limit is held by a memory cgroup (version 1), and there is none at {root}; drop limits="
        )
    return root / below.lstrip("/")


def _remove(path: Path) -> None:
    """Remove an empty group; the system needs a moment for who was killed in it."""
    ends = time.monotonic() + _REMOVAL_SECONDS
    while True:
        try:
            return path.rmdir()
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.02)
