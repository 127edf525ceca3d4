"""How fast the disk of a rank is, measured as it is used: frames written and read by the same threads."""

from __future__ import annotations

import time

from ...compression.errors import PenstockError
from ...compression.memory import new_bytes
from ...compression.pool import Frame
from .disk import Disk
from .room import DiskOptions
from .store import UnpooledBuffers

FRAMES, FRAME_BYTES = 16, 2 << 20


def disk_rate(options: DiskOptions) -> float | None:
    """Bytes per second, the slower of writing and reading; None where the folder takes no file."""
    try:
        disk = Disk(options)
    except PenstockError:
        return None
    try:
        return min(_timed(disk))
    except PenstockError:
        return None
    finally:
        disk.close()


def _timed(disk: Disk) -> tuple[float, float]:
    data = new_bytes(FRAME_BYTES).random_()
    began = time.perf_counter()
    kept = [disk.write(Frame(data, FRAME_BYTES, UnpooledBuffers())) for _ in range(FRAMES)]
    disk.drain()
    written = time.perf_counter()
    for one in kept:
        disk.fetch(one)
    for one in kept:
        disk.get(one)
    read = time.perf_counter()
    num_bytes = FRAMES * FRAME_BYTES
    return num_bytes / (written - began), num_bytes / (read - written)
