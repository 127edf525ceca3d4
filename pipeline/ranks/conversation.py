"""A connection whose two ends prove to each other that they know a secret, and which nobody else can join.

Each end gives a fresh number; from both and the secret comes the key of this connection alone. Every message
has an HMAC of its place in the conversation, so that none is altered, left out or said again. Nothing is
encrypted, and nothing is pickled: messages are JSON."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
from typing import Any

from ...compression.errors import TransportError

HANDSHAKE_SECONDS = 10.0
_NUMBER = 32  # bytes of a fresh number, and of an HMAC
_LONGEST = 1 << 26  # bytes of a message


class Refused(TransportError):
    """The other end of the connection does not know the secret."""


class Conversation:
    """One connection, whose ends know each other; ``first``: this end opened it."""

    def __init__(self, connection: socket.socket, secret: bytes, *, first: bool) -> None:
        self.connection = connection
        connection.settimeout(HANDSHAKE_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        mine = secrets.token_bytes(_NUMBER)
        connection.sendall(mine)
        theirs = self._read(_NUMBER)
        self._key = _mac(secret, mine + theirs if first else theirs + mine)
        self._ours, self._others = (b"opens", b"keeps") if first else (b"keeps", b"opens")
        self._sent = self._heard = 0
        if first:  # who opens proves it first, so a stranger is told nothing
            connection.sendall(_mac(self._key, self._ours))
        try:
            proof = self._read(_NUMBER)
        except OSError:
            proof = b""
        if not hmac.compare_digest(proof, _mac(self._key, self._others)):
            raise Refused("the two ends of a connection do not have the same secret")
        if not first:
            connection.sendall(_mac(self._key, self._ours))

    def say(self, message: Any) -> None:
        """Send anything that JSON can say."""
        data = json.dumps(message).encode()
        self.connection.sendall(
            len(data).to_bytes(4, "big") + self._sign(self._ours, self._sent, data) + data
        )
        self._sent += 1

    def hear(self) -> Any:
        """Return the next message.

        Raises: OSError: the connection is gone, or what came is not what the other end said."""
        length = int.from_bytes(self._read(4), "big")
        if length > _LONGEST:
            raise ConnectionError(f"a message of {length} bytes is too long")
        signed, data = self._read(_NUMBER), self._read(length)
        if not hmac.compare_digest(signed, self._sign(self._others, self._heard, data)):
            raise ConnectionError("a message was altered on its way")
        self._heard += 1
        return json.loads(data)

    def _sign(self, speaker: bytes, place: int, data: bytes) -> bytes:
        return _mac(self._key, speaker + place.to_bytes(8, "big") + data)

    def _read(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            if not (more := self.connection.recv(min(length - len(data), 1 << 20))):
                raise ConnectionError("the other end closed the connection")
            data += more
        return bytes(data)


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, hashlib.sha256)
