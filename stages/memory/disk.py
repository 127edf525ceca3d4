"""The disk of a rank: what its stores put there lies in one file, and comes back bit for bit or not at all.

A frame stays in memory until it is written. Its pieces go to the disk as requests of their own, so that one
large frame alone keeps several of them busy; each has a checksum (XXH3), tested by the thread that read it.
A few threads read and write, reads first: what the backward waits for goes before what only has to leave.
Who writes faster than the disk waits, so that what has not left yet cannot fill the memory. What finds no
room stays in memory as it was packed, and that is said once.
"""

from __future__ import annotations

import dataclasses
import mmap
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from ...compression.buffers import Frame, Pool, new_bytes, size_class, view_at
from ...compression.errors import PenstockError, StageError
from ..units import show_bytes
from .byte_budget import Tiers
from .swap_file import ANYWHERE, UNIT, DiskOptions, Room, Slab, aligned, folder_of, worded

REQUEST_BYTES = 1 << 20
MOST_WAITING = 64 << 20  # bytes to be written
IDLE_SECONDS = 0.1
Done = Callable[[BaseException | None], None]


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One piece of work: ``run`` gets memory of its thread, ``REQUEST_BYTES`` from a page on; ``done`` is
    told what it raised, None for nothing, with the lock held. ``num_bytes``: what it keeps in memory."""

    run: Callable[[memoryview], None]
    done: Done
    num_bytes: int = 0


class IoThreads:
    """Threads with one queue of reads and one of writes; each starts when it is needed and ends when idle.

    ``changed`` is the lock of it all, and of those who use it: whatever ``done`` is told changes under it."""

    def __init__(self, name: str, *, depth: int, most_waiting: int, tiers: Tiers | None = None) -> None:
        """At most ``depth`` requests at a time; ``most_waiting``: bytes in memory that are to be written,
        which ``tiers`` count."""
        self.name, self.depth, self.most_waiting = name, depth, most_waiting
        self.changed, self._tiers = threading.Condition(threading.Lock()), tiers or Tiers()
        self.seconds_waited = 0.0  # of those who had something to write and no room
        self.waiting_bytes = self.most_waited_bytes = 0
        self._reads, self._writes = deque[Request](), deque[Request]()
        self._threads: set[threading.Thread] = set()
        self._num_busy, self._closing = 0, False

    def submit_writes(self, requests: Sequence[Request]) -> None:
        """Queue what is to be written; waits while too much waits already. Called without the lock."""
        num_bytes = sum(request.num_bytes for request in requests)
        with self.changed:
            if not self._has_room(num_bytes):
                began = time.perf_counter()
                self.changed.wait_for(lambda: self._has_room(num_bytes))
                self.seconds_waited += time.perf_counter() - began
            self._queue(self._writes, requests)
            self._tiers.device.add(num_bytes)  # whoever waited had counted it itself
            self._tiers.leaving.add(num_bytes)
            self.waiting_bytes += num_bytes
            self.most_waited_bytes = max(self.most_waited_bytes, self.waiting_bytes)

    def submit_reads(self, requests: Sequence[Request]) -> None:
        """Queue what is to be read, before all that is to be written. Called with the lock held."""
        self._queue(self._reads, requests)

    def cancel(self, requests: Iterable[Request]) -> int:
        """Take back the requests that no thread has begun; returns how many. Called with the lock held."""
        num = 0
        for request in requests:
            for queue in (self._reads, self._writes):
                if request in queue:
                    queue.remove(request)
                    self._ends(request)
                    num += 1
        if num:
            self.changed.notify_all()
        return num

    def drain(self) -> None:
        """Wait until nothing is queued or running."""
        with self.changed:
            self.changed.wait_for(lambda: not (self._reads or self._writes or self._num_busy))

    def close(self) -> None:
        """Do what is queued, and end the threads; a later request starts others."""
        with self.changed:
            threads, self._closing = list(self._threads), True
            self.changed.notify_all()
        for thread in threads:
            thread.join()
        self._closing = False

    def _ends(self, request: Request) -> None:
        self.waiting_bytes -= request.num_bytes
        self._tiers.device.add(-request.num_bytes)
        self._tiers.leaving.add(-request.num_bytes)

    def _has_room(self, num_bytes: int) -> bool:
        return not self.waiting_bytes or self.waiting_bytes + num_bytes <= self.most_waiting

    def _queue(self, queue: deque[Request], requests: Sequence[Request]) -> None:
        in_hand = len(self._reads) + len(self._writes) + self._num_busy
        while len(self._threads) < min(self.depth, in_hand + len(requests)):
            own = memoryview(mmap.mmap(-1, REQUEST_BYTES))  # here, where whoever asks hears of an error
            name = f"{self.name}-{len(self._threads)}"
            thread = threading.Thread(target=self._run, args=(own,), name=name)
            thread.start()  # before anything is queued that nobody would do
            self._threads.add(thread)
        queue.extend(requests)
        self.changed.notify_all()

    def _run(self, own: memoryview) -> None:
        try:
            self._work(own)
        finally:
            self._threads.discard(threading.current_thread())

    def _work(self, own: memoryview) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(self._awaited, timeout=IDLE_SECONDS)
                if not (self._reads or self._writes):
                    self._threads.discard(threading.current_thread())
                    return
                self._num_busy += 1
                request = (self._reads or self._writes).popleft()
            error: BaseException | None = None
            try:
                request.run(own)
            except BaseException as raised:  # raised again by whoever waits
                error = raised
            with self.changed:
                self._num_busy -= 1
                try:
                    request.done(error)
                finally:  # whatever that raises, nobody waits for what has ended
                    self._ends(request)
                    self.changed.notify_all()
            del request, error  # they hold what they were about

    def _awaited(self) -> bool:
        return bool(self._reads or self._writes or self._closing)


_MOST_IDLE = 32 << 20  # bytes kept for later, a little more when two threads give at once


class PageBuffers(Pool):
    """Buffers that begin at a page and are whole pages long; new ones cost a fault a page."""

    def __init__(self, *, most_idle: int = _MOST_IDLE) -> None:
        """Start empty; at most ``most_idle`` bytes wait for the next who takes one."""
        super().__init__()
        self._pages: dict[int, list[mmap.mmap]] = {}
        self._most_idle = most_idle

    @property
    def num_idle_bytes(self) -> int:
        """Bytes of the buffers that nobody uses."""
        return sum(size * len(kept) for size, kept in list(self._pages.items()))

    def take(self, num_bytes: int) -> Tensor:
        """Lend a 1-D uint8 tensor of at least ``num_bytes`` bytes, in whole pages."""
        size = size_class(num_bytes)
        try:
            pages = self._pages[size].pop()
        except LookupError:
            pages = mmap.mmap(-1, size)
        array = np.frombuffer(pages, dtype=np.uint8)
        weakref.finalize(array, self._kept, size, pages).atexit = False
        return torch.from_numpy(array)

    def give(self, buffer: Tensor) -> None:
        """Do nothing: the buffer is back when nobody holds it."""

    def _kept(self, size: int, pages: mmap.mmap) -> None:
        if self.num_idle_bytes + size <= self._most_idle:
            self._pages.setdefault(size, []).append(pages)


class Reading:
    """A frame that is being read into a buffer; ``num_open`` pieces are not there yet."""

    def __init__(self, frame: Frame, num_open: int) -> None:
        """Begin with all pieces missing."""
        self.frame, self.num_open = frame, num_open
        self.error: BaseException | None = None
        self.is_taken = False  # somebody waits for it, and lets go of the buffer


class SlabFrame:
    """A frame in memory (``frame``), in the file from ``start`` on, or in both; the disk's lock holds it.

    ``num_open``: pieces that are not written yet; ``stays``: somebody looks at the one in memory."""

    def __init__(self, frame: Frame, start: int | None) -> None:
        """Begin in memory; ``start``: None for one that stays there."""
        self.frame: Frame | None = frame
        self.num_bytes, self.start = frame.num_bytes, start
        self.checksums: list[int] = []
        self.requests: list[Request] = []
        self.reading: Reading | None = None
        self.error: BaseException | None = None
        self.num_open, self.stays, self.is_forgotten = 0, False, False

    def bytes_of(self, number: int) -> int:
        """Bytes of a piece."""
        return min(REQUEST_BYTES, self.num_bytes - number * REQUEST_BYTES)

    def write_piece(self, number: int, own: memoryview) -> tuple[memoryview, int]:
        """Take the checksum of a piece; returns what to write, in whole units, and where.

        Args:    own: a thread's own memory from a page on, for what is not laid out so."""
        assert self.frame is not None, "a frame is in memory until it is written"
        num_bytes, address = self.bytes_of(number), _address(self.frame, number)
        length, room = aligned(num_bytes), self.frame.buffer.numel() - number * REQUEST_BYTES
        self.checksums[number] = xxhash.xxh3_64_intdigest(view_at(address, num_bytes))
        if address % UNIT or length > room:
            own[:num_bytes] = view_at(address, num_bytes)
            return own[:length], self._place(number)
        return view_at(address, length), self._place(number)

    def begin_writing(self, requests: list[Request]) -> None:
        """These will write its pieces."""
        self.requests, self.num_open = requests, len(requests)

    def begin_reading(self, pool: Pool) -> None:
        """Lend a buffer for all of it."""
        buffer = pool.take(aligned(self.num_bytes))
        self.reading = Reading(Frame(buffer, self.num_bytes, pool), len(self.checksums))

    def piece_to_read(self, number: int, reading: Reading, own: memoryview) -> tuple[memoryview, int]:
        """Where to read a piece to, in whole units, and from where."""
        address, length = _address(reading.frame, number), aligned(self.bytes_of(number))
        return own[:length] if address % UNIT else view_at(address, length), self._place(number)

    def check_piece(self, number: int, reading: Reading, data: memoryview, folder: Path) -> None:
        """Hold a piece that was read against its checksum.

        Raises:  StageError: these are not the bytes that were written."""
        num_bytes, address = self.bytes_of(number), _address(reading.frame, number)
        if address % UNIT:
            view_at(address, num_bytes)[:] = data[:num_bytes]
        found = xxhash.xxh3_64_intdigest(data[:num_bytes])
        if found != self.checksums[number]:
            raise StageError(
                f"a frame comes back from disk as it was written, found other bytes in the frame of "
                f"{self.num_bytes} bytes at {self.start} of the file in {folder} (checksum "
                f"{found:016x} at {self._place(number)}, written {self.checksums[number]:016x}); look at the "
                "disk, or choose another folder (memory.path=)"
            )

    def _place(self, number: int) -> int:
        assert self.start is not None, "a frame that is read or written has its place"
        return self.start + number * REQUEST_BYTES


def _address(frame: Frame, number: int) -> int:
    return frame.buffer.data_ptr() + number * REQUEST_BYTES


class Disk:
    """One file for all stores of a rank; closed by whoever made it. Called from any thread.

    ``bytes_written`` and ``bytes_read``: of the file; ``memory`` counts what lies there meanwhile."""

    def __init__(
        self,
        options: DiskOptions = ANYWHERE,
        *,
        depth: int = 4,
        most_waiting: int = MOST_WAITING,
        slab: Callable[[Path], Slab] = Slab,
        tiers: Tiers | None = None,
    ) -> None:
        """Open a file without a name.

        Args:    depth: how many requests the disk is given at a time.
                 most_waiting: the most bytes that wait in memory to be written; then ``write`` waits.
                 slab: what opens the file in a folder.
                 tiers: those of the rank, which count what lies in memory meanwhile.
        Raises:  ConfigError: the folder takes no file. PlanError: no size in bytes."""
        self.folder = folder_of(options)
        self._slab = slab(self.folder)
        self._room = Room(self._slab, options)
        self.memory = tiers or Tiers()
        self._threads = IoThreads("penstock-disk", depth=depth, most_waiting=most_waiting, tiers=self.memory)
        self._changed, self._buffers = self._threads.changed, PageBuffers()
        self._gone = deque[SlabFrame]()  # forgotten by whoever could not wait for the lock
        self._error: BaseException | None = None
        self.bytes_written = self.bytes_read = 0

    @property
    def direct(self) -> bool:
        """Whether the file is read and written past the page cache."""
        return self._slab.direct

    @property
    def seconds_waited(self) -> float:
        """Seconds in which there was no room for what was to be written."""
        return self._threads.seconds_waited

    @property
    def most_waited_bytes(self) -> int:
        """The most bytes that waited in memory to be written."""
        return self._threads.most_waited_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the file that hold a frame."""
        with self._changed:
            self._sweep()
            return self._room.lent_bytes

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._room.size

    @property
    def takes(self) -> bool:
        """Whether there is room, as far as is known."""
        return self._room.takes

    @property
    def buffers(self) -> Pool:
        """Where frames are packed best: they are written from there without a copy."""
        return self._buffers

    def write(self, frame: Frame, *, ready: Callable[[], None] = lambda: None) -> SlabFrame:
        """Begin to write ``frame``, whose hold becomes the disk's; waits while much is to be written.

        Args:    ready: waits until the frame's bytes are there.
        Raises:  StageError: an earlier frame could not be written."""
        self.check()
        with self._changed:
            self._sweep()
            start = self._room.take(frame.num_bytes) if frame.num_bytes else None
        kept = SlabFrame(frame, start)
        if kept.start is None:
            self.memory.device.add(frame.num_bytes)
        else:
            kept.checksums = [0] * -(-frame.num_bytes // REQUEST_BYTES)
            kept.begin_writing([self._writing(kept, n, ready) for n in range(len(kept.checksums))])
            self._threads.submit_writes(kept.requests)
        return kept

    def fetch(self, kept: SlabFrame, pool: Pool | None = None) -> None:
        """Begin to read a frame into a buffer of ``pool``, unless it is in memory or on its way."""
        with self._changed:
            self._sweep()
            self._fetch(kept, pool)

    def get(self, kept: SlabFrame, pool: Pool | None = None) -> Frame:
        """Return a frame: one that was not written yet as it is, else read into memory of whoever holds it.

        Raises:  StageError: it is not what was written, or the disk refuses."""
        with self._changed:
            if kept.frame is not None and kept.error is None:
                self.memory.device.add(kept.num_bytes * (not kept.stays and bool(kept.requests)))
                kept.stays = True  # somebody looks into it now, so it need not be written any more
                kept.num_open -= self._threads.cancel(kept.requests)
                return kept.frame
            if kept.error is None:
                self._fetch(kept, pool)
            if (reading := kept.reading) is not None:
                reading.is_taken = True
                self._changed.wait_for(lambda: not reading.num_open)
                kept.reading = None
                self.memory.device.add(-kept.num_bytes)  # from here on, whoever asked has it
        if error := kept.error or (reading.error if reading else None):
            self._error = None if self._error is error else self._error
            raise error
        assert reading is not None, "a frame is in memory, or read"
        return reading.frame

    def forget(self, kept: SlabFrame) -> None:
        """Let go of a frame. Waits for nothing: a garbage collector may call it in the middle of anything."""
        self._gone.append(kept)
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
        self._slab.close()

    def __str__(self) -> str:
        moved = f"{show_bytes(self.bytes_written)} written, {show_bytes(self.bytes_read)} read"
        past = "past the page cache" if self.direct else "through the page cache"
        return f"disk: {self.folder}, {past}, {moved}, {self.seconds_waited:.2f} s waited for room"

    def __repr__(self) -> str:
        return f"<{self}>"

    def _writing(self, kept: SlabFrame, number: int, ready: Callable[[], None]) -> Request:
        """The request that writes a piece of a frame."""

        def run(own: memoryview) -> None:
            ready()
            data, at = kept.write_piece(number, own)
            self._slab.write_all(data, at)

        def done(error: BaseException | None) -> None:
            self.bytes_written += 0 if error else aligned(kept.bytes_of(number))
            kept.num_open -= 1
            if error is not None and kept.error is None:
                kept.error = worded(error, f"{kept.num_bytes} bytes could not be written to", self.folder)
                self._error = self._error or kept.error
            if not kept.num_open:
                self._written(kept)

        return Request(run=run, done=done, num_bytes=kept.bytes_of(number))

    def _reading(self, kept: SlabFrame, number: int) -> Request:
        """The request that reads a piece of a frame, and holds it against its checksum."""
        reading = kept.reading
        assert reading is not None, "a piece belongs to a frame that is read"

        def run(own: memoryview) -> None:
            data, at = kept.piece_to_read(number, reading, own)
            self._slab.read_all(data, at)
            kept.check_piece(number, reading, data, self.folder)

        def done(error: BaseException | None) -> None:
            self.bytes_read += 0 if error else aligned(kept.bytes_of(number))
            reading.num_open -= 1
            if error is not None and reading.error is None:
                reading.error = worded(error, f"{kept.num_bytes} bytes could not be read from", self.folder)
            if kept.is_forgotten:
                self._free(kept)

        return Request(run=run, done=done)

    def _fetch(self, kept: SlabFrame, pool: Pool | None) -> None:
        if kept.frame is None and kept.reading is None and not kept.is_forgotten:
            kept.begin_reading(pool or self._buffers)
            self.memory.device.add(kept.num_bytes)
            self._threads.submit_reads([self._reading(kept, n) for n in range(len(kept.checksums))])

    def _written(self, kept: SlabFrame) -> None:
        """All pieces are written, or one was refused: then the frame stays, as nobody may read it back."""
        if kept.error is None and not kept.stays and kept.frame is not None:
            kept.frame = kept.frame.release()
        if kept.is_forgotten:
            self._free(kept)

    def _sweep(self) -> None:
        """Let go of what was forgotten. Called with the lock held."""
        while self._gone:
            kept = self._gone.popleft()
            kept.is_forgotten = True
            kept.num_open -= self._threads.cancel(kept.requests)
            self._free(kept)

    def _free(self, kept: SlabFrame) -> None:
        """Give back the bytes of a frame that nobody writes or reads any more."""
        if kept.num_open or (kept.reading is not None and kept.reading.num_open):
            return
        if kept.frame is not None:
            kept.frame = kept.frame.release()
            self.memory.device.add(0 if kept.requests and not kept.stays else -kept.num_bytes)
        if kept.reading is not None and not kept.reading.is_taken:
            kept.reading.frame.release()
            kept.reading = None
            self.memory.device.add(-kept.num_bytes)
        if kept.start is not None:
            self._room.give(kept.start)
            kept.start = None


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
