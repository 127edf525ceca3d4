"""One frame of a rank's file: where it lies, in which pieces it is written and read, and their checksums.

Pieces go to the disk as requests of their own, so that one large frame alone keeps several of them busy; each
is checked by the thread that read it, while it is in that core's cache.
Source: XXH3, https://github.com/Cyan4973/xxHash.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

from ...compression.errors import StageError
from ...compression.memory import view_at
from ...compression.pool import Frame, Pool
from .extents import UNIT, aligned
from .io_threads import REQUEST_BYTES, Request


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
