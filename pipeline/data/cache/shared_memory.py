"""The one piece of shared memory: the broker writes it, clients map it and cannot write.

It has no name, so nothing stays behind of it; it lives as long as somebody has it. The kernel seals it: no
process that is given it can change its size, or map it for writing, not even by way of /proc. Source: the
manual pages memfd_create(2) and fcntl(2) of Linux, F_SEAL_FUTURE_WRITE."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
from pathlib import Path

from ....compression.errors import ConfigError
from ....stages.files import reason
from ....stages.units import show_bytes

_SEAL_FUTURE_WRITE = 0x10  # of linux/fcntl.h, since Linux 5.1


class SharedMemory:
    """Memory of ``num_bytes`` that this process writes.

    Attributes: view: its bytes.
    Raises:     ConfigError: the machine has not so much."""

    def __init__(self, num_bytes: int) -> None:
        room = available()
        if num_bytes > room:
            raise ConfigError(
                f"capacity={show_bytes(num_bytes)} does not fit: {show_bytes(room)} of this machine's memory "
                "are free; choose less"
            )
        self._file = os.memfd_create("penstock-cache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, num_bytes)
            self._map = mmap.mmap(self._file, num_bytes)
            _seal(self._file)
        except (OSError, OverflowError, ValueError) as error:
            os.close(self._file)
            why = reason(error) if isinstance(error, OSError) else str(error)
            raise ConfigError(f"{show_bytes(num_bytes)} cannot be shared ({why}); choose less") from error
        self.view = memoryview(self._map)

    def for_reading(self) -> int:
        """Return a new file descriptor of it that can be read only; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give it up; those who read it keep it until they do, too."""
        self.view.release()
        self._map.close()
        os.close(self._file)


class Window:
    """A client's view of the shared memory, whose descriptor it need not keep."""

    def __init__(self, file: int, num_bytes: int) -> None:
        if not 0 < num_bytes <= os.fstat(file).st_size:
            raise ConnectionError(f"shared memory of {num_bytes} bytes has {os.fstat(file).st_size}")
        self._map = mmap.mmap(file, num_bytes, prot=mmap.PROT_READ)
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Unmap it."""
        with contextlib.suppress(BufferError):  # in a fork of a process that is just copying
            self.view.release()
            self._map.close()


def _seal(file: int) -> None:
    fixed = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fixed | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)
    except (
        OSError
    ):  # an older kernel: clients have a descriptor that reads only, and are trusted not to reopen it
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fixed)


def available(root: Path = Path("/")) -> int:
    """Bytes of memory that are free, by what the machine and the groups of this process allow."""
    free = [_of_the_machine(root), *_of_groups(root)]
    return max(0, min(free))


def _of_the_machine(root: Path) -> int:
    text = (root / "proc/meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _of_groups(root: Path) -> list[int]:
    """Bytes left in each memory cgroup that this process is in, and in those above."""
    left = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, kinds, name = line.split(":", 2)
        if kinds == "memory":
            home, most, now = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif not kinds:
            home, most, now = root / "sys/fs/cgroup", "memory.max", "memory.current"
        else:
            continue
        group = home / name.lstrip("/")
        for folder in (group, *group.parents):
            limit, used = _text(folder / most).strip(), _text(folder / now).strip()
            if limit.isdigit() and used.isdigit():
                left.append(int(limit) - int(used) + _reclaimable(folder))
            if folder == home:
                break
    return left


def _reclaimable(group: Path) -> int:
    """Pages of files that a group is counted for and would give up first."""
    found = re.search(r"^(?:total_)?inactive_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
    return int(found[1]) if found else 0


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""
