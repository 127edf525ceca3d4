"""Samples in a Redis server, for jobs on several machines, asked like the client of a broker.

The server keeps what fits by its own ``maxmemory-policy``, and knows no orders and no epochs. Without it
samples are read as ever, and that is told."""

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from ....compression.errors import ConfigError
from .client import Hit
from .policy import Times

_RETRY_SECONDS = 1.0  # until a server that is away is asked again
_CHECK = 8  # bytes of the checksum in front of a value; then the length of the stamp, and it


class RedisClient:
    """One connection of a run to ``redis://HOST:PORT/DB``, made anew in a process that gets a pickled copy.

    The same name of ``data`` gets the same bytes; ``tell`` hears once why nothing is shared."""

    def __init__(self, url: str, *, data: str, tell: Callable[[str], None]) -> None:
        self._url, self._tell = url, tell
        self._prefix = f"penstock:{hashlib.blake2b(data.encode(), digest_size=16).hexdigest()}:"
        self._has_told, self._next_try = False, 0.0
        self._connect()

    def begin(self, epoch: int, order: Sequence[int], following: Sequence[int] | None) -> None:
        """Nobody asks."""

    def has_turn(self) -> bool:
        """Nobody waits for another run."""
        return True

    def measured(self, times: Times) -> None:
        """Nobody asks."""

    def use(self, indices: Sequence[int], *, epoch: int | None = None) -> Sequence[Hit | None]:
        """Return what the server has of ``indices``."""
        keys = [f"{self._prefix}{index}" for index in indices]
        found = self._ask(lambda server: server.mget(keys)) if keys else []
        return [None] * len(keys) if found is None else list(map(_hit, found))

    def store(
        self,
        indices: Sequence[int],
        payloads: Sequence[bytes],
        stamps: Sequence[bytes] | None = None,
        *,
        epoch: int | None = None,
    ) -> int:
        """Hand samples to the server; return how many it took."""
        rows = list(zip(indices, payloads, stamps or [b""] * len(indices), strict=True))

        def put(server: Any) -> Any:
            with server.pipeline(transaction=False) as several:
                for index, payload, stamp in rows:
                    rest = bytes([len(stamp)]) + stamp + payload
                    several.set(f"{self._prefix}{index}", xxhash.xxh3_64_digest(rest) + rest)
                return several.execute(raise_on_error=False)

        return sum(done is True for done in self._ask(put) or ())

    def drop(self, index: int, stamp: bytes) -> None:
        """A sample is no longer what it was."""
        self._ask(lambda server: server.delete(f"{self._prefix}{index}"))

    def close(self) -> None:
        """End the connection."""
        self._server.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_server"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._connect()

    def _connect(self) -> None:
        try:
            import redis
        except ImportError:
            raise ConfigError(
                f"cache.backend={self._url} needs the package redis, which is not installed; pip install "
                "redis"
            ) from None
        try:
            self._server = redis.Redis.from_url(self._url, socket_timeout=2.0, socket_connect_timeout=2.0)
        except ValueError as error:
            raise ConfigError(f"cache.backend={self._url} is no address ({error})") from error
        self._errors = redis.RedisError, OSError

    def _ask(self, ask: Callable[[Any], Any]) -> Any:
        """Return the server's answer, or None while it is away."""
        if time.monotonic() < self._next_try:
            return None
        try:
            return ask(self._server)
        except self._errors as error:
            self._next_try = time.monotonic() + _RETRY_SECONDS
            if not self._has_told:
                self._has_told = True
                why = " ".join(str(error).split())
                self._tell(f"training goes on without the sample cache: {self._url}: {why}")
            return None


def _hit(value: bytes | None) -> Hit | None:
    """Parse a value; None for one that is damaged or not ours."""
    if value is None or len(value) <= _CHECK or xxhash.xxh3_64_digest(value[_CHECK:]) != value[:_CHECK]:
        return None
    begin = _CHECK + 1 + value[_CHECK]
    return Hit(payload=value[begin:], stamp=value[_CHECK + 1 : begin])
