"""Messages between the broker and its clients: a length, a kind and a body: bounded, checked, never code.

```
   HELLO  -> answer, then the shared memory          BEGIN -> answer;  ORDERS -> empty answer
   USE    -> answer;  DONE                           OFFER -> answer;  the bytes of each that is accepted
   STATUS, TURN -> answer                                      -> empty answer, if there were any
   MEASURED, DROP
```
An answer, and the bytes of a sample, have no kind. Numbers are words of 32 bits in the machine's own order,
as both ends are on one machine; the rest is JSON."""

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
_LENGTH = struct.Struct("=Q")
_AT_ONCE = 1 << 18  # bytes that are read in a call
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
    """Kind of a message."""

    HELLO = 1
    MEASURED = 2
    BEGIN = 3  # words: epoch; the answer is 1 if nobody has sent its orders
    ORDERS = 4  # words: epoch, samples of the order, of the following or NOWHERE; the order; the following
    USE = 5  # words: epoch, samples
    DONE = 6
    OFFER = 7  # words: epoch; then OFFERED
    DROP = 8  # words: sample; then its stamp
    STATUS = 9
    TURN = 10  # the answer is 1 if the run may begin its first epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Identity of a connection. Those with the same job and run are one reader of each sample."""

    job: str  # for people
    run: str  # tells two runs of one name apart
    data: str  # data set, and how it was read and decoded: the same name gets the same bytes
    num_samples: int
    batch_size: int
    epochs: int
    share: float | None = None  # part of the cache that is the job's; None: what others leave, in equal parts

    def __post_init__(self) -> None:
        for name in (self.job, self.run, self.data):
            if not 0 < len(name) <= 1024 or not name.isprintable():
                raise TransportError("the names of job, run and data are of 1 to 1024 printable characters")
        if not 0 < self.num_samples <= MOST_SAMPLES:
            raise TransportError(f"a data set has 1 to {MOST_SAMPLES} samples, found {self.num_samples}")
        counts = (self.batch_size, self.epochs)
        if min(counts) < 1 or max(counts) > NOWHERE:
            raise TransportError(f"batch_size and epochs are 1 to {NOWHERE}")
        if self.share is not None and not 0 < self.share <= 1:
            raise TransportError(f"a share is above 0 and up to 1, found {self.share}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Answer to a hello, which the shared memory follows; or why the run is ``refused``."""

    num_pages: int = 0
    page_bytes: int = 0
    refused: str = ""


def send(connection: socket.socket, *parts: bytes | bytearray | memoryview) -> None:
    """Send a message; each part of a long one may take the timeout of the socket."""
    length = sum(map(len, parts))
    parts = (_LENGTH.pack(length), *parts)
    for part in parts if length > _AT_ONCE else [b"".join(parts)]:
        connection.sendall(part)


def receive(connection: socket.socket, longest: int) -> bytearray:
    """Return the next message; raises TransportError if longer, OSError where nobody sends."""
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > longest:
        raise TransportError(f"a message has {length} bytes, {longest} are the most")
    return _read(connection, length)


def _read(connection: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray()
    while len(data) < num_bytes:
        piece = connection.recv(min(num_bytes - len(data), _AT_ONCE))
        if not piece:
            raise ConnectionResetError("the other end has closed the connection")
        data += piece
    return data


def pack_json(value: Any) -> bytes:
    """Return a dataclass or an object of JSON as text."""
    data = value if isinstance(value, dict) else asdict(value)
    return json.dumps(data, separators=(",", ":")).encode()


def unpack_json(body: bytes | bytearray | memoryview, kind: Any = None) -> Any:
    """Return the JSON of a body, as the dataclass ``kind`` if given; raises TransportError on a misfit."""
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


def pages_of(num_bytes: int, page_bytes: int) -> int:
    """Number of pages of a sample; an empty one takes a page, so that none costs nothing."""
    return max(1, -(-num_bytes // page_bytes))


def pieces(pages: Iterable[int], num_bytes: int, page_bytes: int) -> list[tuple[int, int]]:
    """Return (start, end) in the shared memory of each run of a sample's pages, in order."""
    found: list[tuple[int, int]] = []
    for page in pages:
        size = min(num_bytes, page_bytes)
        num_bytes -= size
        start = page * page_bytes
        if found and found[-1][1] == start:
            start = found.pop()[0]
        found.append((start, page * page_bytes + size))
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
    """Connect to the broker at ``path``; raises OSError where nobody is there, or another user."""
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
