"""What is said between the broker and its clients: a header, and a body: bounded, checked, never code.

```
   hello -> welcome + slab | refused        begin -> wanted;  orders        status -> state
   use   -> leased;  done                   offer -> accepted;  put         measured, drop
```
Lists are arrays of 32 bits in the machine's own order, as both ends are on one machine; the rest is JSON."""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from ....compression.errors import PlanError, TransportError
from ....stages.record import read

HEADER = struct.Struct("=4sB3xQ")
_MAGIC = b"PnC1"
MOST_SAMPLES = 1 << 26  # of a data set
MOST_AT_ONCE = 1 << 14  # samples in a use or an offer
LONGEST_STAMP = 64
LONGEST_CONTROL = 1 << 16
LONGEST_STATE = 1 << 26
NOWHERE = (1 << 32) - 1  # instead of a length; so a sample is shorter
_WORD = 4


class Kind(IntEnum):
    """What a message is."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    MEASURED = 4
    BEGIN = 5
    WANTED = 6
    ORDERS = 7
    USE = 8
    LEASED = 9
    DONE = 10
    OFFER = 11
    ACCEPTED = 12
    PUT = 13
    DROP = 14
    STATUS = 15
    STATE = 16


LONGEST = {
    Kind.HELLO: LONGEST_CONTROL,
    Kind.MEASURED: LONGEST_CONTROL,
    Kind.BEGIN: LONGEST_CONTROL,
    Kind.ORDERS: _WORD * (3 + 2 * MOST_SAMPLES),
    Kind.USE: _WORD * (2 + MOST_AT_ONCE),
    Kind.DONE: 0,
    Kind.OFFER: _WORD * 2 + MOST_AT_ONCE * (2 * _WORD + 1 + LONGEST_STAMP),
    Kind.PUT: (1 << 64) - 1,  # held against what was accepted
    Kind.DROP: _WORD + LONGEST_STAMP,
    Kind.STATUS: 0,
}
"""The bytes that a client may send of each kind; of others none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who connects. Connections that say the same job and run are one reader of each sample.

    Attributes:
        job:     the name that a person sees.
        run:     tells two runs of one name apart.
        data:    the data set, and how it was read and decoded: who says the same gets the same bytes.
        epochs:  how many there will be.
        readers: connections that it will have, as it knows now.
    """

    job: str
    run: str
    data: str
    num_samples: int
    batch_size: int
    epochs: int
    readers: int = 1

    def __post_init__(self) -> None:
        for name in (self.job, self.run, self.data):
            if not 0 < len(name) <= 1024 or not name.isprintable():
                raise TransportError("the names of job, run and data are of 1 to 1024 printable characters")
        if not 0 < self.num_samples <= MOST_SAMPLES:
            raise TransportError(f"a data set has 1 to {MOST_SAMPLES} samples, found {self.num_samples}")
        counts = (self.batch_size, self.epochs, self.readers)
        if min(counts) < 1 or max(counts) > NOWHERE:
            raise TransportError(f"batch_size, epochs and readers are 1 to {NOWHERE}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The slab that comes with it: ``num_pages`` of ``page_bytes`` each."""

    num_pages: int
    page_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """An epoch that begins, and how many samples its orders have; ``following`` None: it is the last."""

    epoch: int
    order: int
    following: int | None = None


def pack(kind: Kind, body: bytes = b"") -> bytes:
    """A whole message."""
    return HEADER.pack(_MAGIC, kind, len(body)) + body


def pack_header(kind: Kind, num_bytes: int) -> bytes:
    """The header of a message whose body comes by itself."""
    return HEADER.pack(_MAGIC, kind, num_bytes)


def unpack_header(data: bytes | bytearray) -> tuple[Kind, int]:
    """The kind of a message and the length of its body.

    Raises: TransportError: it is none."""
    magic, number, length = HEADER.unpack(data)
    if magic != _MAGIC:
        raise TransportError(f"a message begins with {_MAGIC!r}, found {magic!r}")
    try:
        return Kind(number), length
    except ValueError:
        raise TransportError(f"there is no message of kind {number}") from None


def pack_control(kind: Kind, value: Any) -> bytes:
    """A message that is a dataclass or an object of JSON."""
    said = value if isinstance(value, dict) else asdict(value)
    return pack(kind, json.dumps(said, separators=(",", ":")).encode())


def unpack_object(body: bytes | bytearray) -> dict[str, Any]:
    """The object of JSON in a body.

    Raises: TransportError: it is none."""
    try:
        value = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise TransportError(f"a message is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TransportError("a message of JSON is an object")
    return value


def unpack_control(kind: Any, body: bytes | bytearray) -> Any:
    """The dataclass ``kind`` in a body.

    Raises: TransportError: it does not fit."""
    try:
        return read(kind, unpack_object(body), kind.__name__)
    except PlanError as error:
        raise TransportError(str(error)) from error


def words(values: Sequence[int]) -> array[int]:
    """Numbers as they travel."""
    return values if isinstance(values, array) and values.typecode == "I" else array("I", values)


class Body:
    """A body that is read from its begin to its end; TransportError where it is too short or too long."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self._left = memoryview(data)

    def words(self, count: int) -> array[int]:
        """The next ``count`` numbers."""
        found = array("I")
        found.frombytes(self.bytes(_WORD * count))
        return found

    def bytes(self, count: int) -> memoryview:
        """The next ``count`` bytes."""
        if count > len(self._left):
            raise TransportError("a message is shorter than it says")
        found, self._left = self._left[:count], self._left[count:]
        return found

    def stamps(self, count: int) -> Iterator[bytes]:
        """The next ``count`` stamps: their lengths, then they."""
        lengths = bytes(self.bytes(count))
        if count and max(lengths) > LONGEST_STAMP:
            raise TransportError(f"a stamp has at most {LONGEST_STAMP} bytes, found {max(lengths)}")
        rest = bytes(self.bytes(sum(lengths)))
        at = 0
        for length in lengths:
            yield rest[at : at + length]
            at += length

    def count(self) -> int:
        """How many samples a message is about, from its next number."""
        (count,) = self.words(1)
        if count > MOST_AT_ONCE:
            raise TransportError(f"a message is about {MOST_AT_ONCE} samples at most, found {count}")
        return count

    def end(self) -> None:
        """Refuse what is left."""
        if self._left:
            raise TransportError("a message is longer than it says")


def pack_stamps(stamps: Sequence[bytes]) -> bytes:
    """Stamps as they travel; each of at most ``LONGEST_STAMP`` bytes."""
    return bytes(map(len, stamps)) + b"".join(stamps)


assert array("I").itemsize == _WORD, sys.platform
