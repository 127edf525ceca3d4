"""Frames between the broker and its clients: a header, and a body: bounded, checked, never code.

```
   HELLO  -> ANSWER + shared memory, or why not      BEGIN -> ANSWER;  ORDERS
   USE    -> ANSWER;  DONE                           OFFER -> ANSWER;  PUT
   STATUS -> ANSWER                                  MEASURED, DROP
```
Numbers are words of 32 bits in the machine's own order, as both ends are on one machine; the rest is JSON."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from ....compression.errors import PlanError, TransportError
from ....stages.record import read

PAGE_BYTES = 16 * 1024
_CREDENTIALS = struct.Struct("3i")
HEADER = struct.Struct("=4sB3xQ")
_MAGIC = b"PnC2"
MOST_SAMPLES = 1 << 26  # of a data set
LONGEST_STAMP = 64
LONGEST_CONTROL = 1 << 16
LONGEST_STATE = 1 << 26
NOWHERE = (1 << 32) - 1  # instead of a length; so a sample is shorter

OFFERED = struct.Struct(f"=II{LONGEST_STAMP + 1}p")
"""A sample that is offered: index, number of bytes, stamp."""

LEASED = struct.Struct(f"=I{LONGEST_STAMP + 1}p")
"""A sample that is asked for: number of bytes or NOWHERE, stamp; the pages of all follow."""


class Kind(IntEnum):
    """Kind of a frame."""

    HELLO = 1
    MEASURED = 2
    BEGIN = 3  # words: epoch; the answer is 1 if nobody has sent its orders
    ORDERS = 4  # words: epoch, samples of the order, of the following or NOWHERE; the order; the following
    USE = 5  # words: epoch, samples
    DONE = 6
    OFFER = 7  # words: epoch; then OFFERED
    PUT = 8  # the bytes of what was accepted
    DROP = 9  # words: sample; then its stamp
    STATUS = 10
    ANSWER = 11


_LONGEST = {
    Kind.HELLO: (LONGEST_CONTROL, 0),
    Kind.MEASURED: (LONGEST_CONTROL, 0),
    Kind.BEGIN: (4, 0),
    Kind.ORDERS: (12, 8),
    Kind.USE: (4, 4),
    Kind.DONE: (0, 0),
    Kind.OFFER: (4, OFFERED.size),
    Kind.PUT: ((1 << 64) - 1, 0),  # held against what was accepted
    Kind.DROP: (4 + LONGEST_STAMP, 0),
    Kind.STATUS: (0, 0),
}
"""Most bytes of a body that a client may send, and how many more for each sample of its data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Identity of a connection. Those with the same job and run are one reader of each sample.

    Attributes:
        job: Name that a person sees.
        run: Tells two runs of one name apart.
        data: Data set, and how it was read and decoded: the same name gets the same bytes.
        epochs: Number of epochs there will be.
    """

    job: str
    run: str
    data: str
    num_samples: int
    batch_size: int
    epochs: int

    def __post_init__(self) -> None:
        for name in (self.job, self.run, self.data):
            if not 0 < len(name) <= 1024 or not name.isprintable():
                raise TransportError("the names of job, run and data are of 1 to 1024 printable characters")
        if not 0 < self.num_samples <= MOST_SAMPLES:
            raise TransportError(f"a data set has 1 to {MOST_SAMPLES} samples, found {self.num_samples}")
        counts = (self.batch_size, self.epochs)
        if min(counts) < 1 or max(counts) > NOWHERE:
            raise TransportError(f"batch_size and epochs are 1 to {NOWHERE}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Answer to a hello, which comes with the shared memory; or why the run is ``refused``."""

    num_pages: int = 0
    page_bytes: int = 0
    refused: str = ""


def pack(kind: Kind, *parts: bytes | bytearray | memoryview) -> bytes:
    """Return a whole frame."""
    return pack_header(kind, sum(map(len, parts))) + b"".join(parts)


def pack_header(kind: Kind, num_bytes: int) -> bytes:
    """Return the header of a frame whose body is sent by itself."""
    return HEADER.pack(_MAGIC, kind, num_bytes)


def unpack_header(data: bytes | bytearray) -> tuple[Kind, int]:
    """Return the kind of a frame and the length of its body.

    Raises: TransportError: it is none."""
    magic, number, length = HEADER.unpack(data)
    if magic != _MAGIC:
        raise TransportError(f"a message begins with {_MAGIC!r}, found {magic!r}")
    try:
        return Kind(number), length
    except ValueError:
        raise TransportError(f"there is no message of kind {number}") from None


def check_length(kind: Kind, num_bytes: int, num_samples: int) -> None:
    """Refuse a frame that a client with so many samples does not send."""
    fixed, each = _LONGEST.get(kind, (-1, 0))
    if num_bytes > fixed + each * num_samples:
        raise TransportError(f"a message of kind {kind.name} with {num_bytes} bytes")


def pack_json(kind: Kind, value: Any) -> bytes:
    """Return a frame that holds a dataclass or an object of JSON."""
    data = value if isinstance(value, dict) else asdict(value)
    return pack(kind, json.dumps(data, separators=(",", ":")).encode())


def unpack_json(body: bytes | bytearray, kind: Any = None) -> Any:
    """Return the object of JSON in a body, as the dataclass ``kind`` if there is one.

    Raises: TransportError: it does not fit."""
    try:
        value = json.loads(bytes(body))
        return value if kind is None else read(kind, value, kind.__name__)
    except PlanError as error:
        raise TransportError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise TransportError(f"a message is not JSON: {error}") from error


def pack_words(*values: int, then: Sequence[int] = ()) -> bytes:
    """Return numbers as words."""
    return array("I", values).tobytes() + (then if isinstance(then, array) else array("I", then)).tobytes()


def unpack_words(data: bytes | bytearray | memoryview) -> array[int]:
    """Return words as numbers. Raises: ValueError: half a word is left."""
    words = array("I")
    words.frombytes(data)
    return words


def pack_offer(epoch: int, samples: Iterable[tuple[int, int, bytes]]) -> bytes:
    """Return the frame that offers samples: (index, number of bytes, stamp) each."""
    return pack(Kind.OFFER, pack_words(epoch), *(OFFERED.pack(*sample) for sample in samples))


def pages_of(num_bytes: int, page_bytes: int) -> int:
    """Number of pages of a sample; an empty one takes a page, so that none costs nothing."""
    return max(1, -(-num_bytes // page_bytes))


def pieces(pages: Iterable[int], num_bytes: int, page_bytes: int, *, begin: int = 0) -> list[tuple[int, int]]:
    """Return (start, end) in the shared memory of each piece of a sample's bytes from ``begin`` on, in order.

    Pages side by side are one piece."""
    found: list[tuple[int, int]] = []
    left = num_bytes
    for page in pages:
        size = min(left, page_bytes)
        left -= size
        start = page * page_bytes
        if begin >= size:
            begin -= size
            continue
        start, end, begin = start + begin, start + size, 0
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def default_socket(runtime: str | None) -> Path:
    """Return the path of this user's broker; ``runtime``: the user's XDG_RUNTIME_DIR, if any."""
    if runtime:
        return Path(runtime) / "penstock" / "cache.sock"
    return Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}" / "cache.sock"


def is_ours(connection: socket.socket) -> bool:
    """True if the process at the other end is of the same user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1] == os.getuid()


def connect(path: Path, timeout: float | None) -> socket.socket:
    """Connect to the broker at ``path``; with ``timeout`` 0 without any wait.

    Raises: OSError: nobody is there. PermissionError: another user's process is."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(str(path))
        if not is_ours(connection):
            raise PermissionError(errno.EACCES, f"{path} is another user's")
    except BaseException:
        connection.close()
        raise
    return connection
