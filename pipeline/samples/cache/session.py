"""What one connection says and is answered, between bytes and ``core.py``."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from ....compression.errors import TransportError
from .core import Core, NotWelcome
from .messages import (
    LONGEST_STATE,
    MOST_SAMPLES,
    NOWHERE,
    Begin,
    Body,
    Hello,
    Kind,
    Welcome,
    pack,
    pack_control,
    pack_stamps,
    unpack_control,
)
from .pages import pieces
from .policy import Times
from .runs import Member
from .shared_memory import Slab

_SCRAP = bytearray(1 << 16)
"""Takes the bytes of a sample that is not kept any more; nobody reads it."""


@dataclass(slots=True)
class Reply:
    """What goes back: bytes, a file that goes with them, and if it is the last, why."""

    data: bytes = b""
    file: int | None = None
    last: str = ""

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            os.close(self.file)


class Session:
    """A connection to the core: nobody's before its hello."""

    def __init__(self, core: Core, slab: Slab, clock: Callable[[], float]) -> None:
        self._core, self._slab, self._clock = core, slab, clock
        self._member: Member | None = None
        self._begin: Begin | None = None
        self._answers: dict[Kind, Callable[[Member, bytearray], bytes]] = {
            Kind.MEASURED: self._measured,
            Kind.BEGIN: self._begins,
            Kind.ORDERS: self._orders,
            Kind.USE: self._use,
            Kind.DONE: self._done,
            Kind.OFFER: self._offer,
            Kind.DROP: self._drop,
        }

    def __str__(self) -> str:
        return f"a connection of job {self._member.run.hello.job}" if self._member else "a connection"

    def close(self) -> None:
        """The connection is gone."""
        if self._member is not None:
            self._core.leave(self._member, self._clock())
            self._member = None

    def answer(self, kind: Kind, body: bytearray) -> Reply:
        """Take a whole message; return what is answered.

        Raises: TransportError: it is malformed, or not its turn."""
        if kind is Kind.STATUS:
            state = pack_control(Kind.STATE, self._core.status(self._clock()))
            assert len(state) < LONGEST_STATE
            return Reply(state)
        if kind is Kind.HELLO:
            return self._hello(body)
        return Reply(self._answers[kind](self._known(), body))

    def begin_put(self, num_bytes: int) -> None:
        """Samples come, ``num_bytes`` together.

        Raises: TransportError: those that were accepted have another size."""
        member = self._known()
        accepted = sum(stored.num_bytes for stored in member.writing)
        if accepted != num_bytes:
            raise TransportError(f"{num_bytes} bytes come where {accepted} were accepted")
        self.wrote(0)

    def buffers(self, most: int) -> list[memoryview]:
        """Where the next bytes of what is put go: as many pieces of one sample."""
        stored = self._known().writing[0]
        if not stored.kept:
            return [memoryview(_SCRAP)[: stored.num_bytes - stored.written]]
        pages = self._core.ledger.pages.page_bytes
        first = stored.written // pages
        left = stored.num_bytes - first * pages
        found = pieces(stored.pages[first : first + most], left, pages, begin=stored.written - first * pages)
        return [self._slab.view[start:end] for start, end in found]

    def wrote(self, num_bytes: int) -> None:
        """So many bytes have come into them."""
        member = self._known()
        if num_bytes:
            self._core.wrote(member, num_bytes)
        while member.writing and not member.writing[0].num_bytes:  # there at once
            self._core.wrote(member, 0)

    def _known(self) -> Member:
        if self._member is None:
            raise TransportError("a connection says first whose it is")
        return self._member

    def _hello(self, body: bytearray) -> Reply:
        if self._member is not None:
            raise TransportError("a connection says once whose it is")
        try:
            self._member = self._core.join(unpack_control(Hello, body), self._clock())
        except NotWelcome as error:
            return Reply(pack_control(Kind.REFUSED, {"why": str(error)}), last=str(error))
        pages = self._core.ledger.pages
        welcome = Welcome(num_pages=pages.num_pages, page_bytes=pages.page_bytes)
        return Reply(pack_control(Kind.WELCOME, welcome), self._slab.for_reading())

    def _measured(self, member: Member, body: bytearray) -> bytes:
        self._core.measured(member, unpack_control(Times, body), self._clock())
        return b""

    def _begins(self, member: Member, body: bytearray) -> bytes:
        begin = unpack_control(Begin, body)
        sizes = (begin.order, begin.following or 0)
        if not 0 <= begin.epoch < 1 << 32 or min(sizes) < 0 or max(sizes) > member.run.hello.num_samples:
            raise TransportError(f"{begin} does not fit {member.run.hello.num_samples} samples")
        wanted = self._core.wants(member, begin.epoch)
        self._begin = begin if wanted else None
        return pack_control(Kind.WANTED, {"wanted": wanted})

    def _orders(self, member: Member, body: bytearray) -> bytes:
        begin, self._begin = self._begin, None
        if begin is None:
            raise TransportError("orders come without being asked for")
        rest = Body(body)
        order = rest.words(begin.order)
        following = None if begin.following is None else rest.words(begin.following)
        rest.end()
        self._core.begin(member, begin.epoch, order, following, self._clock())
        return b""

    def _use(self, member: Member, body: bytearray) -> bytes:
        epoch, indices = _samples(rest := Body(body))
        rest.end()
        found = self._core.use(member, epoch, indices, self._clock())
        there = [stored for stored in found if stored is not None]
        lengths = array("I", [NOWHERE if stored is None else stored.num_bytes for stored in found])
        pages = [lengths.tobytes(), *(stored.pages.tobytes() for stored in there)]
        return pack(Kind.LEASED, b"".join([*pages, pack_stamps([stored.stamp for stored in there])]))

    def _done(self, member: Member, body: bytearray) -> bytes:
        self._core.release(member)
        return b""

    def _offer(self, member: Member, body: bytearray) -> bytes:
        epoch, indices = _samples(rest := Body(body))
        sizes, stamps = rest.words(len(indices)), rest.stamps(len(indices))
        samples = list(zip(indices, sizes, stamps, strict=True))
        rest.end()
        if any(size == NOWHERE for size in sizes):
            raise TransportError(f"a sample has fewer than {NOWHERE} bytes")
        accepted = self._core.offer(member, epoch, samples, self._clock())
        return pack(Kind.ACCEPTED, bytes(stored is not None for stored in accepted))

    def _drop(self, member: Member, body: bytearray) -> bytes:
        rest = Body(body)
        (index,) = rest.words(1)
        self._core.drop(member, index, bytes(rest.bytes(len(body) - 4)))
        return b""


def _samples(body: Body) -> tuple[int, array[int]]:
    (epoch,) = body.words(1)
    return epoch, body.words(body.count())


assert MOST_SAMPLES < NOWHERE
