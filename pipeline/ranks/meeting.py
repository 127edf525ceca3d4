"""The store where ranks of several machines meet: one launcher keeps it, for whoever has the run's secret.

torch's TCPStore listens on every interface and asks nobody who they are, and what a run is told includes
names to import. Here one address listens, and who cannot prove to know the secret is told nothing."""

from __future__ import annotations

import contextlib
import datetime
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.distributed_c10d import Store

from ...compression.errors import ConfigError, TransportError
from .conversation import HANDSHAKE_SECONDS, Conversation

Address = tuple[str, int]

_ANSWER_SECONDS = 60.0
"""An answer may have to wait for a link that was down."""
_PAUSE = 0.05


class Items:
    """What a store holds, by name; every change is whole."""

    def __init__(self) -> None:
        self._items: dict[str, str] = {}
        self._lock = threading.Lock()

    def ask(self, what: str, key: str, value: Any = None) -> Any:
        """Answer one request: set, get (None where there is nothing), add, delete."""
        with self._lock:
            if what == "set":
                self._items[key] = str(value)
            elif what == "add":
                self._items[key] = str(int(self._items.get(key, "0")) + int(value))
            elif what == "delete":
                return self._items.pop(key, None) is not None
            elif what == "count":
                return len(self._items)
            return self._items.get(key)


class Meeting:
    """Keeps a store for whoever has the secret, at one address of this machine.

    Raises: ConfigError: the address is not this machine's, or the port is taken."""

    def __init__(self, address: Address, secret: bytes) -> None:
        self.items, self._secret = Items(), secret
        self._listening = _listening(address)
        threading.Thread(target=self._accept, name="penstock-meeting", daemon=True).start()

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self._listening.getsockname()[:2]

    def close(self) -> None:
        """Listen no more; conversations end with this process."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        # Whoever sends what nobody of ours would is left alone.
        with connection, contextlib.suppress(OSError, ValueError, TypeError, TransportError):
            talk = Conversation(connection, self._secret, first=False)
            connection.settimeout(None)
            while True:
                talk.say(self.items.ask(*talk.hear()))


class MeetingStore(Store):
    """The store at ``address``, as torch's own would be: for groups of ranks, and for launchers.

    Args:   room: before every name that a group of ranks gives.
    Raises: OSError: nobody keeps it there. Refused: with another secret."""

    def __init__(self, address: Address, secret: bytes, *, room: str = "") -> None:
        super().__init__()
        self.address, self._room, self._lock = address, room, threading.Lock()
        connection = socket.create_connection(address, timeout=HANDSHAKE_SECONDS)
        try:
            self._talk = Conversation(connection, secret, first=True)
        except BaseException:
            connection.close()
            raise
        connection.settimeout(_ANSWER_SECONDS)

    @property
    def own_address(self) -> str:
        """The address of this machine by which it reaches the store."""
        return self._talk.connection.getsockname()[0]

    def close(self) -> None:
        """Leave."""
        self._talk.connection.close()

    def ask(self, what: str, key: str, value: Any = None) -> Any:
        """What ``Items.ask`` answers there.

        Raises: RuntimeError: nobody answers."""
        with self._lock:
            try:
                self._talk.say([what, key, value])
                return self._talk.hear()
            except OSError as error:
                self._talk.connection.close()
                raise RuntimeError(f"the meeting at {named(self.address)} has gone: {error}") from error

    def set(self, key: str, value: Any) -> None:
        """Keep ``value`` under a name."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.ask("set", self._room + key, data.decode("latin-1"))

    def get(self, key: str) -> bytes:
        """Return what is kept under a name, when somebody has set it."""
        self.wait([key])
        return str(self.ask("get", self._room + key)).encode("latin-1")

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them were set."""
        return all(self.ask("get", self._room + key) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all of them are set. Raises RuntimeError: they are not, in time."""
        until = time.monotonic() + (timeout.total_seconds() if timeout else _ANSWER_SECONDS)
        while not self.check(keys):
            if time.monotonic() > until:
                raise RuntimeError(f"nobody set {', '.join(keys)} in time")
            time.sleep(_PAUSE)

    def add(self, key: str, value: int) -> int:
        """Add to a number that is kept under a name, 0 at first; return the sum."""
        return int(self.ask("add", self._room + key, value))

    def delete_key(self, key: str) -> bool:
        """Forget a name; return whether it was known."""
        return bool(self.ask("delete", self._room + key))

    def num_keys(self) -> int:
        """How many names are kept, whoever keeps them."""
        return int(self.ask("count", ""))

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Every wait here is told its own."""


def named(address: Address) -> str:
    """``host:port``."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listening(address: Address) -> socket.socket:
    host, port = address
    with contextlib.ExitStack() as opened:
        try:
            (family, *_, where), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            listening = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
            listening.listen(128)
        except OSError as error:
            raise ConfigError(
                f"master={named(address)} must be a free port at an address of node 0, this machine: "
                f"{error.strerror or error}"
            ) from error
        opened.pop_all()
        return listening
