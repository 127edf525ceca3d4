"""What a client that is connected says and gets: samples out of the slab, and samples for it.

It raises where the broker is gone or does not answer, and ``client.py`` goes on without."""

from __future__ import annotations

import os
import select
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from .messages import (
    LONGEST_CONTROL,
    LONGEST_STAMP,
    NOWHERE,
    Begin,
    Body,
    Hello,
    Kind,
    Welcome,
    pack,
    pack_control,
    pack_header,
    pack_stamps,
    unpack_control,
    unpack_object,
    words,
)
from .pages import pages_of, pieces
from .policy import Times
from .shared_memory import Window
from .wire import Bytes, Wire

_DONE = pack(Kind.DONE)
_BATCH_BYTES = 8 << 20


class Hit(NamedTuple):
    """A sample of the cache: a copy of its bytes, and the stamp that its writer gave it."""

    payload: bytes
    stamp: bytes


class NotTaken(Exception):
    """The broker does not want this run, and says why."""


class Link:
    """A connection whose hello was answered, and the slab.

    Raises: OSError, TransportError, from all its methods: the broker is gone, stopped, or none of ours."""

    def __init__(self, wire: Wire) -> None:
        """Take the answer to the hello.

        Raises: NotTaken: it is a no."""
        kind, body, file = wire.hear_with_file(LONGEST_CONTROL)
        try:
            if kind is Kind.REFUSED:
                raise NotTaken(str(unpack_object(body).get("why")))
            if kind is not Kind.WELCOME or file is None:
                raise ConnectionError("the broker answers a hello by something else")
            welcome: Welcome = unpack_control(Welcome, body)
            self._window = Window(file, welcome.num_pages * welcome.page_bytes)
        finally:
            if file is not None:
                os.close(file)
        bytes(
            _BATCH_BYTES
        )  # untouched, and freed: glibc then keeps twice as much, see mallopt(3). It would else give
        # every batch of copies back to the system, whose fresh pages cost several times the copying.
        self._wire, self._num_pages, self._page_bytes = wire, welcome.num_pages, welcome.page_bytes

    def begin(self, epoch: int, order: Sequence[int], following: Sequence[int] | None) -> None:
        """Say which samples an epoch and the next will use, if no other connection of the run has."""
        begin = Begin(epoch=epoch, order=len(order), following=None if following is None else len(following))
        answer = self._wire.ask(pack_control(Kind.BEGIN, begin), Kind.WANTED, LONGEST_CONTROL)
        if unpack_object(answer).get("wanted") is True:
            nobody = () if following is None else following
            self._wire.send(pack(Kind.ORDERS, words(order).tobytes() + words(nobody).tobytes()))

    def measured(self, times: Times) -> None:
        """Say what the warm-up epoch measured."""
        self._wire.send(pack_control(Kind.MEASURED, times))

    def use(self, epoch: int, indices: Sequence[int]) -> list[Hit | None]:
        """Copy what is there of samples, each named once; None for the others."""
        count = len(indices)
        said = array("I", (epoch, count)) + words(indices)
        longest = 4 * (2 * count + self._num_pages) + count * (1 + LONGEST_STAMP)
        body = Body(self._wire.ask(pack(Kind.USE, said.tobytes()), Kind.LEASED, longest))
        lengths = body.words(count)
        needed = [0 if length == NOWHERE else pages_of(length, self._page_bytes) for length in lengths]
        pages = body.words(sum(needed))
        stamps = body.stamps(count - lengths.count(NOWHERE))
        found: list[Hit | None] = []
        at = 0
        for length, num_pages in zip(lengths, needed, strict=True):
            if num_pages:
                found.append(Hit(self._copy(pages[at : at + num_pages], length), next(stamps)))
                at += num_pages
            else:
                found.append(None)
        if at:  # nothing is read any more, so its pages may go to others
            self._wire.send(_DONE)
        return found

    def store(self, epoch: int, samples: Sequence[tuple[int, Bytes, bytes]]) -> int:
        """Offer samples (index, bytes, stamp) and put those that are accepted. Returns: how many were."""
        indices, payloads, stamps = zip(*samples, strict=True)
        views = [memoryview(payload).cast("B") for payload in payloads]
        said = array("I", (epoch, len(indices), *indices, *map(len, views))).tobytes()
        answer = self._wire.ask(
            pack(Kind.OFFER, said + pack_stamps(stamps)), Kind.ACCEPTED, longest=len(indices)
        )
        if len(answer) != len(indices):
            raise ConnectionError(f"the broker answers for {len(answer)} samples of {len(indices)}")
        accepted = [view for view, wanted in zip(views, answer, strict=True) if wanted]
        if accepted:
            self._wire.send(pack_header(Kind.PUT, sum(map(len, accepted))), *accepted)
        return len(accepted)

    def drop(self, index: int, stamp: bytes) -> None:
        """Say that a sample is no longer what it was under ``stamp``."""
        self._wire.send(pack(Kind.DROP, words([index]).tobytes() + stamp))

    def close(self) -> None:
        """End it."""
        self._wire.close()
        self._window.close()

    def _copy(self, pages: array[int], num_bytes: int) -> bytes:
        view = self._window.view
        copy = b"".join([view[start:end] for start, end in pieces(pages, num_bytes, self._page_bytes)])
        if len(copy) != num_bytes:
            raise ConnectionError("the broker names pages that there are not")
        return copy


def say_hello(path: Path, hello: Hello, *, timeout: float, patience: float) -> Wire:
    """Connect, and say whose it is; ``Link`` takes the answer. Raises: OSError: there is no broker."""
    wire = Wire(path, timeout, patience=patience)
    try:
        wire.send(pack_control(Kind.HELLO, hello))
    except BaseException:
        wire.close()
        raise
    return wire


def has_answered(wire: Wire, seconds: float) -> bool:
    """Wait so long for an answer. Returns: whether it, or the end of the connection, is there."""
    poll = select.poll()  # a file number may be too large for select
    poll.register(wire.socket, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
