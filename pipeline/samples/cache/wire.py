"""A client's end of the socket: a message out, a message in, each within a time; OSError where that fails."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

from ....compression.errors import TransportError
from . import place
from .messages import HEADER, LONGEST_STATE, Kind, pack, unpack_header, unpack_object

Bytes = bytes | bytearray | memoryview
_AT_ONCE = 1 << 18


class Wire:
    """A connection to the broker at ``path``.

    Args:   timeout: seconds that an answer may take, and that anything sent may take to be taken.
            patience: those that it may take to connect, which needs room in the queue of the broker.
    Raises: OSError: there is none of this user."""

    def __init__(self, path: Path, timeout: float, *, patience: float | None = None) -> None:
        self._timeout = timeout
        self.socket = place.connect(path, timeout if patience is None else patience)

    def send(self, *data: Bytes) -> None:
        """Send all of it; what is large may take longer, as long as it goes on."""
        for one in data:
            self.socket.settimeout(self._timeout)
            self.socket.sendall(one)

    def ask(self, message: Bytes, kind: Kind, longest: int) -> bytearray:
        """Say a message and return the body of its answer, which has ``longest`` bytes at most."""
        self.send(message)
        found, body = self._read(bytearray(), longest)
        if found is not kind:
            raise ConnectionError(f"the broker answers by {found.name}, not {kind.name}")
        return body

    def hear_with_file(self, longest: int) -> tuple[Kind, bytearray, int | None]:
        """Return the message that comes, and the file that comes with it, which is the caller's to close."""
        self.socket.settimeout(self._timeout)
        data, files, *_ = socket.recv_fds(self.socket, HEADER.size, 1)
        with contextlib.ExitStack() as opened:
            for file in files:
                opened.callback(os.close, file)
            kind, body = self._read(bytearray(data), longest)
            opened.pop_all()
        return kind, body, files[0] if files else None

    def close(self) -> None:
        """End the connection; of a copy in a forked process this copy alone."""
        self.socket.close()

    def _read(self, found: bytearray, longest: int) -> tuple[Kind, bytearray]:
        """Read on from ``found`` to the end of one message."""
        until = time.monotonic() + self._timeout
        self._read_to(found, HEADER.size, until)
        try:
            kind, length = unpack_header(found[: HEADER.size])
        except TransportError as error:
            raise ConnectionError(str(error)) from error
        if length > longest:
            raise ConnectionError(f"the broker answers by {length} bytes, where {longest} are the most")
        self._read_to(found, HEADER.size + length, until)
        if len(found) > HEADER.size + length:
            raise ConnectionError("the broker says more than it was asked")
        del found[: HEADER.size]
        return kind, found

    def _read_to(self, found: bytearray, length: int, until: float) -> None:
        while len(found) < length:
            self.socket.settimeout(max(1e-3, until - time.monotonic()))
            more = self.socket.recv(_AT_ONCE)
            if not more:
                raise ConnectionResetError("the broker has closed the connection")
            found += more


def state_of(path: Path, *, timeout: float) -> dict[str, Any]:
    """Ask the broker at ``path`` what a person wants to see.

    Raises: OSError: it is not there, or does not answer."""
    with contextlib.closing(Wire(path, timeout)) as wire:
        return unpack_object(wire.ask(pack(Kind.STATUS), Kind.STATE, LONGEST_STATE))
