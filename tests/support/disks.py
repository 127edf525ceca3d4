"""Swap files that are slow, short or refuse, and frames to put there: what a disk may do to a rank."""

import os
import threading
import time

import torch

from penstock.compression.buffers import Frame, Pool
from penstock.stages.memory.disk import UNIT, SwapFile

MIB = 1 << 20
SIZES = (1, 100, UNIT, UNIT + 1, MIB - 1, MIB, MIB + 1, 3_000_001)


class Slow(SwapFile):
    """Waits before every request; counts how many wait at a time."""

    seconds = 0.2

    def __init__(self, folder):
        super().__init__(folder)
        self.now = self.most = 0
        self.order, self.lock = [], threading.Lock()

    def _wait(self, what):
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
            self.order.append(what)
        time.sleep(self.seconds)
        with self.lock:
            self.now -= 1

    def write(self, data, at):
        self._wait("write")
        return super().write(data, at)

    def read(self, data, at):
        self._wait("read")
        return super().read(data, at)


class Short(SwapFile):
    """Moves half of what it is asked for, or a page."""

    def write(self, data, at):
        return super().write(data[: max(UNIT, len(data) // 2 // UNIT * UNIT)], at)

    def read(self, data, at):
        return super().read(data[: max(UNIT, len(data) // 2 // UNIT * UNIT)], at)


class Fails(SwapFile):
    """Refuses what it is told to refuse."""

    writing = reading = None

    def write(self, data, at):
        if self.writing is not None:
            raise self.writing
        return super().write(data, at)

    def read(self, data, at):
        if self.reading is not None:
            raise self.reading
        return super().read(data, at)


def refusing(number):
    """A call that the system refuses with an error of this number."""

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    return refuse


def frame_of(num_bytes, seed=0, pool=None):
    """A frame of so many random bytes, and these bytes."""
    pool = pool or Pool()
    buffer = pool.take(num_bytes)
    values = torch.randint(
        256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    buffer[:num_bytes] = values
    return Frame(buffer, num_bytes, pool), values


def lent_bytes(disk):
    """Bytes of the file that are lent to frames."""
    with disk._changed:
        disk._sweep()
        return disk.space.lent_bytes


def put_all(store, sizes=SIZES, **options):
    """Put frames of these sizes, by number; returns their bytes."""
    kept = {}
    for key, num_bytes in enumerate(sizes):
        frame, kept[key] = frame_of(num_bytes, key, **options)
        store.put(key, frame)
    return kept
