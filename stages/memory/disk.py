"""The disk of a rank: frames of all its stores lie in one file, and come back bit for bit or not at all.

A frame stays in memory until it is written, and where it finds no space. It moves in pieces of 1 MiB, so that
one large frame keeps several requests busy; every piece has a checksum (XXH3). Reads come first: a backward
waits for them. The file has no name, so nothing of it stays, however the process ends. It is read and written
past the page cache where the file system allows (O_DIRECT): a cached page takes the memory that the tier
saves.

Source: open(2), O_DIRECT; posix_fallocate(3); segregated free lists, Wilson et al., Dynamic
        Storage Allocation: A Survey and Critical Review, 1995, section 3.6.
"""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import mmap
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from ...compression.buffers import Frame, Pool, new_bytes, size_class, view_at
from ...compression.errors import ConfigError, PenstockError, StageError
from ..files import FULL, reason
from ..units import is_zero, parse_bytes, show_bytes
from ..worker import Worker
from .byte_budget import Tiers

UNIT = 4096  # bytes that a file system and O_DIRECT count in
REQUEST_BYTES = 1 << 20
MOST_WAITING = 64 << 20  # bytes to be written
GROWTH_BYTES = 64 << 20  # by which the file grows
MOST_IDLE = 32 << 20  # bytes of idle buffers, a little more when two threads give at once


def aligned(num_bytes: int) -> int:
    """Round ``num_bytes`` up to whole units."""
    return -(-num_bytes // UNIT) * UNIT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiskOptions:
    """Options of the tier ``disk`` of a rank.

    Attributes:
        path: The folder of its file; None: the one for temporary files.
        budget: The most bytes of the file, as ``"20GiB"``. 0: nothing goes there; None: no limit.
    """

    path: str | Path | None = None
    budget: int | str | None = None

    @property
    def allowed(self) -> bool:
        """Return whether anything may go there."""
        return self.budget is None or not is_zero(self.budget)


ANYWHERE = DiskOptions()
_CANNOT_RESERVE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


class SwapFile:
    """A file without a name; ``direct``: it is moved past the page cache, in multiples of 4,096."""

    def __init__(self, folder: Path) -> None:
        """Open an empty file in ``folder``; ConfigError if that is none, or takes no file."""
        self.folder, self.direct = folder, False
        try:
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            file = tempfile.TemporaryFile(buffering=0, dir=folder)
        except OSError as error:
            raise ConfigError(
                f"the tier disk keeps its file in a folder that can be written, found {folder} "
                f"({reason(error)}); choose another one (memory.path=)"
            ) from error
        self._file, self._end = file.fileno(), weakref.finalize(self, file.close)
        with contextlib.suppress(OSError, AttributeError):  # not every file system or platform has it
            flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT)
            self.direct = True

    def grow(self, size: int, more: int) -> bool:
        """Make a file of ``size`` bytes longer by ``more``; False: there is no space for that."""
        try:  # to reserve the space, so that no write finds the disk full
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
        """Write bytes from ``at`` on; returns their number, which may be less."""
        return os.pwrite(self._file, data, at)

    def read(self, data: memoryview, at: int) -> int:
        """Read bytes from ``at`` on; returns their number, which may be less."""
        return os.preadv(self._file, [data], at)

    def move_all(self, move: Callable[[memoryview, int], int], data: memoryview, at: int) -> None:
        """``write`` or ``read`` all of ``data``, however little the system moves at a time."""
        done, unit = 0, UNIT if self.direct else 1
        while done < len(data):
            moved = move(data[done:], at + done) // unit * unit
            if moved <= 0:
                raise OSError(errno.EIO, f"it moved {done} of {len(data)} bytes and no more")
            done += moved

    def close(self) -> None:
        """Close the file, which frees its space; once."""
        self._end()


class SwapSpace:
    """Slots of a swap file of ``size`` bytes, of which ``lent_bytes`` are lent; the disk's lock guards it. A
    slot has the size of its class, so that frames of about the same length take turns in it."""

    def __init__(self, file: SwapFile, budget: int | None) -> None:
        self._file, self._budget = file, budget
        self.size = self.lent_bytes = self._end = 0  # the end of the last slot
        self.is_full = self._has_warned = False  # as far as is known
        self._free, self._lent = dict[int, list[int]](), dict[int, int]()  # starts by size, size by start

    def take(self, num_bytes: int) -> int | None:
        """Offset of a slot of ``num_bytes`` or more; None: there is no space, with one warning."""
        size, refusal = size_class(num_bytes), ""
        least = min((free for free, starts in self._free.items() if starts and free >= size), default=None)
        if least is None or least > 2 * size:
            refusal = self._add_slot(size)
            least = least if refusal else size
        if least is None:
            self.is_full = True
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(f"{refusal}; what finds no room stays in memory, packed", stacklevel=4)
            return None
        start = self._free[least].pop()
        self._lent[start] = least
        self.lent_bytes += least
        return start

    def give(self, start: int) -> None:
        """Take back a slot."""
        size = self._lent.pop(start)
        self.lent_bytes -= size
        self._free[size].append(start)
        self.is_full = False
        if not self._lent:
            self._free.clear()
            self._end = 0

    def _add_slot(self, size: int) -> str:
        """Add a free slot of ``size`` bytes at the end; returns why not."""
        least = self._end + size - self.size
        if least > 0:
            most = max(least, GROWTH_BYTES)
            if self._budget is not None:
                most = min(most, (self._budget - self.size) // UNIT * UNIT)
            refused = f"the tier disk has no room for {show_bytes(size)} more in {self._file.folder}"
            if most < least:
                return f"{refused} within memory.disk={show_bytes(self._budget or 0)}"
            grown = next((n for n in (most, least) if self._file.grow(self.size, n)), 0)
            if not grown:
                return f"{refused}, where {show_bytes(shutil.disk_usage(self._file.folder).free)} are free"
            self.size += grown
        self._free.setdefault(size, []).append(self._end)
        self._end += size
        return ""


class PageBuffers(Pool):
    """Buffers that begin at a page and are whole pages long; new ones cost a fault a page."""

    def __init__(self, *, most_idle: int = MOST_IDLE) -> None:
        """Start empty; at most ``most_idle`` bytes wait for the next who takes one."""
        super().__init__()
        self._pages: dict[int, list[mmap.mmap]] = {}
        self._most_idle = most_idle

    @property
    def num_idle_bytes(self) -> int:
        """Bytes of the buffers that nobody uses."""
        return sum(size * len(idle) for size, idle in list(self._pages.items()))

    def take(self, num_bytes: int) -> Tensor:
        """Lend a 1-D uint8 tensor of at least ``num_bytes`` bytes, in whole pages."""
        size = size_class(num_bytes)
        try:
            pages = self._pages[size].pop()
        except LookupError:
            pages = mmap.mmap(-1, size)
        array = np.frombuffer(pages, dtype=np.uint8)
        weakref.finalize(array, self._keep, size, pages).atexit = False
        return torch.from_numpy(array)

    def give(self, buffer: Tensor) -> None:
        """Do nothing: the buffer is back when nobody holds it."""

    def _keep(self, size: int, pages: mmap.mmap) -> None:
        if self.num_idle_bytes + size <= self._most_idle:
            self._pages.setdefault(size, []).append(pages)


@dataclasses.dataclass(slots=True, eq=False)
class Reading:
    """A frame that is read into a buffer; ``num_left`` pieces are missing."""

    frame: Frame
    num_left: int
    error: BaseException | None = None
    is_taken: bool = False  # somebody waits for it, to whom the buffer belongs from then on


@dataclasses.dataclass(slots=True, eq=False)
class SwapEntry:
    """A frame in memory (``frame``), in the file from ``start`` on, or in both; the disk's lock guards it.

        write          all pieces written        get, fetch         forget
    in memory  ------->  in the file alone  ------->  read back  ------->  slot and memory are free
        |  get: it stays, what is not written yet is not
    """

    frame: Frame | None
    num_bytes: int
    start: int | None  # None: it found no space
    ready: Callable[[], None] | None  # waits until the frame's bytes are there
    checksums: list[int]
    num_left: int  # pieces that are not written
    num_moving: int = 0  # pieces in the hands of a thread
    reading: Reading | None = None
    error: BaseException | None = None
    stays: bool = False  # somebody reads the frame in memory, so that it need not be written
    is_forgotten: bool = False
    resident: int = 0  # bytes that the tiers count of it, and those of them on their way out
    leaving: int = 0


class Disk:
    """One swap file for all stores of a rank, and its threads; closed by whoever opened it.

    Called from any thread. ``buffers``: where frames are packed best, as they are written from there without
    a copy."""

    def __init__(
        self, options: DiskOptions = ANYWHERE, *, depth: int = 4, most_waiting: int = MOST_WAITING,
        swap_file: Callable[[Path], SwapFile] = SwapFile, tiers: Tiers | None = None,
    ) -> None:  # fmt: skip
        """Open a file without a name, to which ``depth`` requests go at a time. ``most_waiting``: bytes to be
        written from which on ``write`` waits. Raises ConfigError if the folder takes no file."""
        self.folder = Path(tempfile.gettempdir() if options.path is None else options.path)
        self._file = swap_file(self.folder)
        self.direct, self.buffers = self._file.direct, PageBuffers()
        budget = None if options.budget is None else parse_bytes(options.budget, name="memory.disk")
        self.space, self.tiers = SwapSpace(self._file, budget), tiers or Tiers()
        self._threads = Worker("penstock-disk", depth=sys.maxsize, num_threads=depth)
        self._most_waiting, self._waiting_bytes = most_waiting, 0
        self._changed = threading.Condition(threading.Lock())
        self._gone = deque[SwapEntry]()  # forgotten by whoever could not wait for the lock
        self._error: BaseException | None = None
        self.bytes_written = self.bytes_read = 0

    def write(self, frame: Frame, *, ready: Callable[[], None] | None = None) -> SwapEntry:
        """Begin to write ``frame``, whose hold becomes the disk's; ``ready`` waits until it is filled.

        Waits while much is still to be written."""
        self.check()
        num_bytes = frame.num_bytes
        num_pieces = -(-num_bytes // REQUEST_BYTES)
        most = max(0, self._most_waiting - num_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._waiting_bytes <= most)
            self._sweep()
            start = self.space.take(num_bytes) if num_bytes else None
            num_left = 0 if start is None else num_pieces
            entry = SwapEntry(frame, num_bytes, start, ready, [0] * num_pieces, num_left)
            self._count(entry)
            for number in range(num_left):
                self._threads.submit(functools.partial(self._move_piece, entry, number))
        return entry

    def fetch(self, entry: SwapEntry, pool: Pool | None = None) -> None:
        """Begin to read a frame into a buffer of ``pool``, unless it is in memory or on its way."""
        with self._changed:
            self._sweep()
            self._fetch(entry, pool or self.buffers)

    def get(self, entry: SwapEntry, pool: Pool | None = None) -> Frame:
        """Return a frame; StageError: it is not what was written, or the disk refuses."""
        with self._changed:
            if entry.frame is not None and entry.error is None:
                entry.stays = True
                self._count(entry)
                return entry.frame
            if entry.error is None:
                self._fetch(entry, pool or self.buffers)
            if (reading := entry.reading) is not None:
                reading.is_taken = True
                self._changed.wait_for(lambda: not reading.num_left)
                if entry.reading is reading:
                    entry.reading = None  # from here on, the caller counts it
                self._count(entry)
            if error := entry.error or (reading.error if reading else None):
                self._error = None if self._error is error else self._error
                raise error
        assert reading is not None, "a frame is in memory, or read"
        return reading.frame

    def forget(self, entry: SwapEntry) -> None:
        """Let go of a frame, without a wait: a garbage collector may call it in the middle of anything."""
        self._gone.append(entry)
        if self._changed.acquire(blocking=False):
            try:
                self._sweep()
            finally:
                self._changed.release()

    def drain(self) -> None:
        """Wait until all is written and read, then ``check``."""
        self._threads.drain()
        self.check()

    def check(self) -> None:
        """Raise again what a thread raised while it wrote."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Finish what is queued, end the threads and free the file."""
        self._threads.close()
        self._file.close()

    # -- with the lock held --

    def _fetch(self, entry: SwapEntry, pool: Pool) -> None:
        if entry.frame is None and entry.reading is None and not entry.is_forgotten:
            frame = Frame(pool.take(aligned(entry.num_bytes)), entry.num_bytes, pool)
            reading = entry.reading = Reading(frame, len(entry.checksums))
            self._count(entry)
            for number in range(reading.num_left):
                self._threads.submit_first(functools.partial(self._move_piece, entry, number, reading))

    def _count(self, entry: SwapEntry) -> None:
        """Count the bytes of an entry that are in memory, and those of them that are to be written."""
        in_memory, to_write = entry.frame is not None, entry.num_left and not entry.stays
        before, entry.resident = entry.resident, entry.num_bytes * (in_memory or entry.reading is not None)
        self.tiers.device.add(entry.resident - before)
        before, entry.leaving = entry.leaving, entry.num_bytes if in_memory and to_write else 0
        self.tiers.leaving.add(entry.leaving - before)
        self._waiting_bytes += entry.leaving - before
        self._changed.notify_all()

    def _sweep(self) -> None:
        while self._gone:
            entry = self._gone.popleft()
            entry.is_forgotten = True
            self._free(entry)

    def _free(self, entry: SwapEntry) -> None:
        """Give back memory and slot of a forgotten entry, once no thread moves a piece of it."""
        reading = entry.reading
        if entry.num_moving or (reading is not None and reading.is_taken and reading.num_left):
            return
        if entry.frame is not None:
            entry.frame = entry.frame.release()
        if reading is not None and not reading.is_taken:
            reading.frame.release()
            entry.reading = None
        if entry.start is not None:
            self.space.give(entry.start)
            entry.start = None
        self._count(entry)

    # -- in a thread of the disk --

    def _move_piece(self, entry: SwapEntry, number: int, reading: Reading | None = None) -> None:
        """Write a piece of a frame, or with ``reading`` read it, unless nobody needs that any more."""
        # 1. is it still of use
        with self._changed:
            frame = entry.frame if reading is None else reading.frame
            is_needed = entry.reading is reading if reading else not (entry.is_forgotten or entry.stays)
            if frame is None or not is_needed:
                return
            entry.num_moving += 1
        # 2. move it, without the lock
        moved, error = 0, None
        try:
            moved = self._move(entry, frame, number, reads=reading is not None)
        except BaseException as raised:  # raised again by whoever waits
            error = raised
        # 3. tell who waits; the last piece lets go of the memory
        with self._changed:
            entry.num_moving -= 1
            part = reading or entry
            part.num_left -= 1
            if error is not None and part.error is None:
                done = "written to" if reading is None else "read from"
                part.error = self._refusal(error, f"{entry.num_bytes} bytes could not be {done}")
                self._error = self._error or entry.error if reading is None else self._error
            if reading is not None:
                self.bytes_read += moved
            else:
                self.bytes_written += moved
                if not (entry.num_left or entry.error or entry.stays):
                    entry.frame = frame.release()
            if entry.is_forgotten:
                self._free(entry)
            self._count(entry)

    def _move(self, entry: SwapEntry, frame: Frame, number: int, *, reads: bool) -> int:
        """Write a piece, or read it and test its checksum; returns bytes of the file. A piece that does not
        begin at a page, or has no room for whole units, moves through another buffer."""
        assert entry.start is not None, "a frame that is read or written has its slot"
        first = number * REQUEST_BYTES
        num_bytes = min(REQUEST_BYTES, entry.num_bytes - first)
        length, at, address = aligned(num_bytes), entry.start + first, frame.buffer.data_ptr() + first
        is_direct = address % UNIT == 0 and first + length <= frame.buffer.numel()
        other = None if is_direct else self.buffers.take(length)
        piece = view_at(address, num_bytes)
        data = view_at(address if other is None else other.data_ptr(), length)
        if not reads:
            if entry.ready is not None:
                entry.ready()
            entry.checksums[number] = xxhash.xxh3_64_intdigest(piece)
            if not is_direct:
                data[:num_bytes] = piece
            self._file.move_all(self._file.write, data, at)
            return length
        self._file.move_all(self._file.read, data, at)
        checksum, expected = xxhash.xxh3_64_intdigest(data[:num_bytes]), entry.checksums[number]
        if checksum != expected:
            raise StageError(
                f"a frame comes back from disk as it was written, found other bytes in the frame of "
                f"{entry.num_bytes} bytes at {entry.start} of the file in {self.folder} (checksum "
                f"{checksum:016x} at {at}, written {expected:016x}); look at the disk, or choose another "
                "folder (memory.path=)"
            )
        if not is_direct:
            piece[:] = data[:num_bytes]
        return length

    def _refusal(self, error: BaseException, what: str) -> BaseException:
        if not isinstance(error, OSError):
            return error
        is_full = error.errno in FULL
        remedy = "free space there, bound what goes there (memory.disk=)" if is_full else "look at that disk"
        refusal = StageError(
            f"a frame of {what} the disk of {self.folder}, found {reason(error)}; {remedy}, or choose another"
            " folder (memory.path=)"
        )
        refusal.__cause__ = error
        return refusal


AHEAD = 4  # frames that are fetched before they are wanted


def disk_rate(options: DiskOptions) -> float | None:
    """Bytes per second, the slower of writing and reading; None where the folder takes no file."""
    try:
        with contextlib.closing(Disk(options)) as disk:
            return min(timed(disk, num_frames=16, frame_bytes=2 << 20))
    except PenstockError:
        return None


def timed(disk: Disk, *, num_frames: int, frame_bytes: int) -> tuple[float, float]:
    """Write frames of random bytes to ``disk``, read them and forget them: bytes per second of either."""
    data, num_bytes, entries = new_bytes(frame_bytes).random_(), num_frames * frame_bytes, list[SwapEntry]()
    began = time.perf_counter()
    for _ in range(num_frames):
        buffer = disk.buffers.take(frame_bytes)
        buffer[:frame_bytes] = data
        entries.append(disk.write(Frame(buffer, frame_bytes, disk.buffers)))
        del buffer
    disk.drain()
    written = time.perf_counter() - began
    began = time.perf_counter()
    for entry in entries[:AHEAD]:
        disk.fetch(entry)
    for number, entry in enumerate(entries, AHEAD):
        if number < num_frames:
            disk.fetch(entries[number])
        disk.get(entry).release()
        disk.forget(entry)
    read = time.perf_counter() - began
    return num_bytes / written, num_bytes / read
