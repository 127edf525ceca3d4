"""The broker: one thread that hears all connections, moves bytes into the slab, and asks ``core.py``.

Nobody waits for anybody: what is half said stays with its connection, and who does not read its answers is
not heard until it does. What is malformed ends its connection, with one line; nothing else happens."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ....compression.errors import ConfigError, TransportError
from ....stages.units import show_bytes
from . import place
from .core import Core
from .messages import HEADER, LONGEST, Kind, unpack_header
from .pages import PAGE_BYTES, Pages
from .policy import Policy
from .session import Session
from .shared_memory import Slab

MOST_CONNECTIONS = 1000
_AT_ONCE = 1 << 18  # bytes that are read of a connection before others are heard
_MOST_PAGES_AT_ONCE = 512  # of a sample; the system takes 1024 pieces in a call


class Connection:
    """The socket of a client, what it has said so far of a message, and what it has not yet read."""

    def __init__(self, sock: socket.socket, session: Session) -> None:
        self.socket, self.session = sock, session
        self.header = bytearray()
        self.kind: Kind | None = None
        self.left = 0  # bytes of the message that are still to come
        self.body = bytearray()
        self.unsent = bytearray()

    def hear(self) -> bool:
        """Read what has come, a piece. Returns: whether the connection goes on.

        Raises: TransportError: it is malformed."""
        try:
            if self.kind is None:
                data = self.socket.recv(HEADER.size - len(self.header))
                if not data:
                    return False
                self.header += data
                if len(self.header) < HEADER.size:
                    return True
                self._begin()
            if self.left:  # most often all of it is there
                count = self._hear_body()
                if not count:
                    return False
                self.left -= count
        except BlockingIOError:
            return True
        if not self.left:
            self._end()
        return True

    def _begin(self) -> None:
        self.kind, self.left = unpack_header(self.header)
        if self.left > LONGEST.get(self.kind, -1):
            raise TransportError(f"a message of kind {self.kind.name} with {self.left} bytes")
        if self.kind is Kind.PUT:
            self.session.begin_put(self.left)

    def _hear_body(self) -> int:
        if self.kind is not Kind.PUT:
            data = self.socket.recv(min(self.left, _AT_ONCE))
            self.body += data
            return len(data)
        count = self.socket.recvmsg_into(self.session.buffers(_MOST_PAGES_AT_ONCE))[0]
        self.session.wrote(count)
        return count

    def _end(self) -> None:
        kind, body = self.kind, self.body
        self.kind, self.body, self.header = None, bytearray(), bytearray()
        if kind is not None and kind is not Kind.PUT:
            reply = self.session.answer(kind, body)
            if reply.file is not None:
                with contextlib.closing(reply):
                    # A welcome is the first that is sent, and short: it is taken whole or the client is gone.
                    socket.send_fds(self.socket, [reply.data], [reply.file])
            elif reply.data:
                self.send(reply.data)
            if reply.last:
                raise TransportError(reply.last)

    def send(self, data: bytes = b"") -> None:
        """Send what can be, and keep the rest."""
        if not self.unsent and data:
            with contextlib.suppress(BlockingIOError):
                data = data[self.socket.send(data) :]
        self.unsent += data
        if self.unsent:
            with contextlib.suppress(BlockingIOError):
                del self.unsent[: self.socket.send(self.unsent)]


class Broker:
    """Answers at ``listener`` until it is closed.

    Args: tell: hears one line of every connection that is refused or ended for what it said."""

    def __init__(
        self,
        listener: socket.socket,
        core: Core,
        slab: Slab,
        *,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        most_connections: int = MOST_CONNECTIONS,
    ) -> None:
        self.core, self._slab, self._listener = core, slab, listener
        self._tell, self._clock, self._most = tell, clock, most_connections
        self._selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()
        self._listens = False
        self._listen()

    def run(self, *, until: Callable[[], bool] = lambda: False, pause: float | None = None) -> None:
        """Answer until ``until``, which is asked after whatever happens, and every ``pause`` seconds."""
        while not until():
            for key, events in self._selector.select(pause):
                connection = key.data
                if connection is None:
                    self._accept()
                elif connection in self._connections:
                    self._serve(connection, events)

    def close(self) -> None:
        """End all connections, and listen no longer."""
        for connection in self._connections:
            connection.socket.close()
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # too many open files: those who wait are taken when somebody leaves
            self._tell(f"a connection is not taken: {error}")
            return self._listen(False)
        sock.setblocking(False)
        if not place.is_ours(sock):
            self._tell("a connection of another user is refused")
            return sock.close()
        connection = Connection(sock, Session(self.core, self._slab, self._clock))
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        if len(self._connections) >= self._most:
            self._listen(False)

    def _listen(self, listens: bool = True) -> None:
        if listens and not self._listens:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        elif self._listens and not listens:
            self._selector.unregister(self._listener)
        self._listens = listens

    def _serve(self, connection: Connection, events: int) -> None:
        goes_on = True
        try:
            if events & selectors.EVENT_WRITE:
                connection.send()
            elif events & selectors.EVENT_READ:
                goes_on = connection.hear()
        except TransportError as error:
            self._tell(f"{connection.session} is ended: {error}")
            goes_on = False
        except MemoryError:
            self._tell(f"{connection.session} is ended: there is no memory for what it says")
            goes_on = False
        except OSError:  # the other end is gone
            goes_on = False
        if not goes_on:
            return self._end(connection)
        # Who does not read its answers is not heard: what waits for it is one answer at most.
        wanted = selectors.EVENT_WRITE if connection.unsent else selectors.EVENT_READ
        if self._selector.get_key(connection.socket).events != wanted:
            self._selector.modify(connection.socket, wanted, connection)

    def _end(self, connection: Connection) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.session.close()
        if not self._listens and len(self._connections) < self._most:
            self._listen()


@contextlib.contextmanager
def serving(
    path: Path, policy: Policy, *, tell: Callable[[str], None], page_bytes: int = PAGE_BYTES
) -> Iterator[Broker]:
    """A broker at ``path`` with a slab of the policy's capacity; nothing of it is left behind.

    Raises: ConfigError: the machine has not the memory, or the place is taken."""
    num_pages = policy.capacity // page_bytes
    if not num_pages:
        raise ConfigError(
            f"capacity={show_bytes(policy.capacity)} is less than a page of {show_bytes(page_bytes)}"
        )
    with contextlib.ExitStack() as opened:
        slab = Slab(num_pages * page_bytes)
        opened.callback(slab.close)
        listener = place.listen(path)
        opened.callback(place.leave, path, os.lstat(path))
        broker = Broker(listener, Core(policy, Pages(num_pages, page_bytes)), slab, tell=tell)
        opened.callback(broker.close)
        yield broker
