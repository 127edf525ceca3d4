"""The disk of a rank: what its stores put there lies in one file, and comes back bit for bit or not at all.

A frame stays in memory until it is written; each piece of it has a checksum. What finds no room stays in
memory as it was packed, and that is said once.
Source: claims A5 and A6 of CN115016937A (what is idle leaves the memory); claims 2-4 of CN110032450B.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path

from ...compression.pool import Frame, Pool
from ..units import show_bytes
from .extents import aligned
from .io_threads import MOST_WAITING, REQUEST_BYTES, IoThreads, Request
from .page_buffers import PageBuffers
from .room import ANYWHERE, DiskOptions, Room, folder_of
from .slab import Slab, worded
from .slab_frame import SlabFrame
from .tiers import Tiers


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
