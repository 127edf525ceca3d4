"""The broker: one thread that serves all connections, moves bytes into shared memory, and asks ``core.py``.

Nobody waits for anybody: a connection that has sent half a frame, or does not read its answers, stops where
it is until its socket is ready again. A malformed frame ends its connection, with one line; nothing else
happens."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from ....compression.errors import ConfigError, TransportError
from ....stages.units import show_bytes
from .core import Core, Member, NotWelcome
from .pages import PAGE_BYTES, Pages, Stored, pieces
from .policy import Policy, Times
from .shared_memory import SharedMemory
from .socket_path import is_ours, listening
from .wire import (
    HEADER,
    LEASED,
    NOWHERE,
    OFFERED,
    Hello,
    Kind,
    Welcome,
    check_length,
    pack,
    pack_json,
    unpack_header,
    unpack_json,
    unpack_words,
)

MOST_CONNECTIONS = 1000
_AT_ONCE = 1 << 18  # bytes that are read of a connection before others are heard
_MOST_PAGES_AT_ONCE = 512  # of a sample; the system takes 1024 pieces in a call
_SCRAP = bytearray(1 << 16)  # takes the bytes of a sample that was evicted meanwhile; nobody reads it

Waits = Generator[int, None, None]
"""Yields the event of the socket that must come before it goes on."""


class Connection:
    """A client: its socket, and the conversation with it.

    Attributes:
        waits: The conversation, which yields the event that it waits for.
    """

    def __init__(
        self, sock: socket.socket, core: Core, memory: SharedMemory, clock: Callable[[], float]
    ) -> None:
        self.socket, self._core, self._memory, self._clock = sock, core, memory, clock
        self.member: Member | None = None
        self.waits = self._converse()

    def __str__(self) -> str:
        return f"a connection of job {self.member.run.hello.job}" if self.member else "a connection"

    def close(self) -> None:
        """End it; its run leaves with its last connection."""
        self.socket.close()
        if self.member is not None:
            self._core.leave(self.member, self._clock())

    def _converse(self) -> Waits:
        """Answer frames without end.

        Raises:
            TransportError: A frame is malformed, or not its turn.
            OSError: The other end is gone.
        """
        while True:
            # 1. the header, when others had their turn
            yield selectors.EVENT_READ
            kind, length = unpack_header((yield from self._receive(HEADER.size)))
            if self.member is None and kind not in (Kind.HELLO, Kind.STATUS):
                raise TransportError(f"a {kind.name} comes from a connection that says first whose it is")
            check_length(kind, length, self.member.run.hello.num_samples if self.member else 0)
            # 2. the body, of samples straight into their pages
            if kind is Kind.PUT:
                assert self.member is not None
                yield from self._put(self.member, length)
                continue
            body = yield from self._receive(length)
            # 3. the answer
            if kind is Kind.HELLO:
                yield from self._welcome(unpack_json(body, Hello))
            elif kind is Kind.STATUS:
                yield from self._send(pack_json(Kind.ANSWER, self._core.status(self._clock())))
            elif self.member is not None:
                try:
                    answer = self._answer(self.member, kind, memoryview(body))
                except (ValueError, struct.error) as error:
                    raise TransportError(f"a malformed message of kind {kind.name} ({error})") from error
                yield from self._send(answer)

    def _receive(self, num_bytes: int) -> Generator[int, None, bytearray]:
        data = bytearray()
        while len(data) < num_bytes:
            try:
                piece = self.socket.recv(min(num_bytes - len(data), _AT_ONCE))
            except BlockingIOError:
                yield selectors.EVENT_READ
                continue
            if not piece:
                raise ConnectionResetError
            data += piece
            if len(data) < num_bytes:
                yield selectors.EVENT_READ
        return data

    def _send(self, data: bytes) -> Waits:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self.socket.send(rest) :]
            except BlockingIOError:
                yield selectors.EVENT_WRITE

    def _put(self, member: Member, num_bytes: int) -> Waits:
        accepted = sum(stored.num_bytes for stored in member.writing)
        if accepted != num_bytes:
            raise TransportError(f"{num_bytes} bytes come where {accepted} were accepted")
        while member.writing:
            try:
                count = self.socket.recvmsg_into(self._buffers(member.writing[0]))[0]
            except BlockingIOError:
                yield selectors.EVENT_READ
                continue
            if not count:
                raise ConnectionResetError
            self._core.wrote(member, count)
            yield selectors.EVENT_READ

    def _buffers(self, stored: Stored) -> list[memoryview]:
        """The rest of a sample's pages, or nobody's memory if it was evicted."""
        if not stored.kept:
            return [memoryview(_SCRAP)[: stored.num_bytes - stored.written]]
        size = self._core.pages.page_bytes
        first = stored.written // size
        pages, left = stored.pages[first : first + _MOST_PAGES_AT_ONCE], stored.num_bytes - first * size
        return [self._memory.view[a:b] for a, b in pieces(pages, left, size, begin=stored.written % size)]

    def _welcome(self, hello: Hello) -> Waits:
        if self.member is not None:
            raise TransportError("a connection says once whose it is")
        try:
            self.member = self._core.join(hello, self._clock())
        except NotWelcome as error:
            yield from self._send(pack_json(Kind.ANSWER, Welcome(refused=str(error))))
            raise
        pages = self._core.pages
        welcome = pack_json(Kind.ANSWER, Welcome(num_pages=pages.num_pages, page_bytes=pages.page_bytes))
        file = self._memory.for_reading()
        try:  # short, and mostly the first that is sent: it is taken whole or the client is gone
            socket.send_fds(self.socket, [welcome], [file])
        finally:
            os.close(file)

    def _answer(self, member: Member, kind: Kind, body: memoryview) -> bytes:
        """Take a whole frame; return its answer, if it has one."""
        core, now = self._core, self._clock()
        if kind is Kind.MEASURED:
            core.measured(member, unpack_json(bytes(body), Times), now)
        elif kind is Kind.BEGIN:
            (epoch,) = unpack_words(body)
            core.release(member)
            return pack(Kind.ANSWER, bytes([epoch > member.run.epoch]))
        elif kind is Kind.ORDERS:
            epoch, num_order, num_following, *_ = words = unpack_words(body)
            order, following = words[3 : 3 + num_order], words[3 + num_order :]
            is_last = num_following == NOWHERE
            if len(words) != 3 + num_order + (0 if is_last else num_following):
                raise TransportError(f"orders of {num_order} and {num_following} samples, not {len(words)}")
            core.begin(member, epoch, order, None if is_last else following, now)
        elif kind is Kind.USE:
            epoch, *indices = unpack_words(body)
            found = core.use(member, epoch, indices, now)
            missing = LEASED.pack(NOWHERE, b"")
            rows = [missing if one is None else LEASED.pack(one.num_bytes, one.stamp) for one in found]
            return pack(Kind.ANSWER, *rows, *(one.pages.tobytes() for one in found if one is not None))
        elif kind is Kind.DONE:
            core.release(member)
        elif kind is Kind.OFFER:
            (epoch,) = unpack_words(body[:4])
            samples = list(OFFERED.iter_unpack(body[4:]))
            if any(num_bytes == NOWHERE for _, num_bytes, _ in samples):
                raise TransportError(f"a sample has fewer than {NOWHERE} bytes")
            accepted = core.offer(member, epoch, samples, now)
            return pack(Kind.ANSWER, bytes(stored is not None for stored in accepted))
        elif kind is Kind.DROP:
            (index,) = unpack_words(body[:4])
            core.drop(member, index, bytes(body[4:]))
        return b""


class Broker:
    """Answers at ``listener`` until it is closed.

    Args:
        tell: Hears one line of every connection that is refused or ended for what it sent.
    """

    def __init__(
        self,
        listener: socket.socket,
        core: Core,
        memory: SharedMemory,
        *,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        most_connections: int = MOST_CONNECTIONS,
    ) -> None:
        self.core, self._memory, self._listener = core, memory, listener
        self._tell, self._clock, self._most = tell, clock, most_connections
        self._selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()
        self._listens = False
        self._listen()

    def run(self, *, until: Callable[[], bool] = lambda: False, pause: float | None = None) -> None:
        """Answer until ``until``, which is asked after whatever happens, and every ``pause`` seconds."""
        while not until():
            for key, _ in self._selector.select(pause):
                if key.data is None:
                    self._accept()
                elif key.data in self._connections:
                    self._serve(key.data)

    def close(self) -> None:
        """End all connections."""
        for connection in self._connections:
            connection.socket.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # too many open files: those who wait are taken when somebody leaves
            self._tell(f"a connection is not taken: {error}")
            return self._listen(False)
        sock.setblocking(False)
        if not is_ours(sock):
            self._tell("a connection of another user is refused")
            return sock.close()
        connection = Connection(sock, self.core, self._memory, self._clock)
        self._connections.add(connection)
        self._selector.register(sock, next(connection.waits), connection)
        if len(self._connections) >= self._most:
            self._listen(False)

    def _listen(self, listens: bool = True) -> None:
        if listens and not self._listens:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        elif self._listens and not listens:
            self._selector.unregister(self._listener)
        self._listens = listens

    def _serve(self, connection: Connection) -> None:
        """Go on with a conversation until it waits again, or end it."""
        why = ""
        try:
            events = next(connection.waits)
            if self._selector.get_key(connection.socket).events != events:
                self._selector.modify(connection.socket, events, connection)
            return
        except TransportError as error:
            why = str(error)
        except MemoryError:
            why = "there is no memory for what it sends"
        except OSError:
            pass  # the other end is gone
        if why:
            self._tell(f"{connection} is ended: {why}")
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.close()
        if len(self._connections) < self._most:
            self._listen()


@contextlib.contextmanager
def serving(
    path: Path, policy: Policy, *, tell: Callable[[str], None], page_bytes: int = PAGE_BYTES
) -> Iterator[Broker]:
    """Run a block with a broker at ``path`` that has memory of the policy's capacity; nothing is left behind.

    Raises: ConfigError: the machine has not the memory, or the path is taken."""
    num_pages = policy.capacity // page_bytes
    if not num_pages:
        raise ConfigError(
            f"capacity={show_bytes(policy.capacity)} is less than a page of {show_bytes(page_bytes)}"
        )
    with contextlib.closing(SharedMemory(num_pages * page_bytes)) as memory, listening(path) as listener:
        core = Core(policy, Pages(num_pages, page_bytes))  # once that memory is known to be there
        with contextlib.closing(Broker(listener, core, memory, tell=tell)) as broker:
            yield broker
