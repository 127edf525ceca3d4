"""How fast the disk of a rank is, measured as it is used: frames written and read by the same threads."""

from __future__ import annotations

import time

from torch import Tensor

from ...compression.errors import PenstockError
from ...compression.memory import new_bytes
from ...compression.pool import Frame
from .disk import Disk
from .room import DiskOptions

FRAMES, FRAME_BYTES = 16, 2 << 20
AHEAD = 4  # frames that are fetched before they are wanted


def disk_rate(options: DiskOptions) -> float | None:
    """Bytes per second, the slower of writing and reading; None where the folder takes no file."""
    try:
        disk = Disk(options)
    except PenstockError:
        return None
    try:
        return min(timed(disk, num_frames=FRAMES, frame_bytes=FRAME_BYTES))
    except PenstockError:
        return None
    finally:
        disk.close()


def timed(disk: Disk, *, num_frames: int, frame_bytes: int) -> tuple[float, float]:
    """Write frames to ``disk``, read them and forget them: bytes per second of either.

    Each fills a buffer of the disk first, as a packer does, with random bytes: others might
    shrink on their way.

    Raises:  StageError: the disk refuses."""
    data, num_bytes = new_bytes(frame_bytes).random_(), num_frames * frame_bytes
    began = time.perf_counter()
    kept = [disk.write(_frame(disk, data)) for _ in range(num_frames)]
    disk.drain()
    written = time.perf_counter() - began
    began = time.perf_counter()
    for one in kept[:AHEAD]:
        disk.fetch(one)
    for number, one in enumerate(kept, AHEAD):
        if number < num_frames:
            disk.fetch(kept[number])
        disk.get(one).release()
        disk.forget(one)
    read = time.perf_counter() - began
    return num_bytes / written, num_bytes / read


def _frame(disk: Disk, data: Tensor) -> Frame:
    buffer = disk.buffers.take(data.nbytes)
    buffer[: data.nbytes] = data
    return Frame(buffer, data.nbytes, disk.buffers)
