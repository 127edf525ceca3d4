"""Slow storage for benches: a process that serves files, or made-up ones, at a limited rate for all who read.

Nothing of it is a file to its readers, so that the page cache of the system cannot answer in its place. It
listens at a socket of this user alone. A reader sends the number of a sample, 4 bytes; it gets a length of 4
bytes, and so many bytes after the latency and when the rate grants them. A number of no sample gets a length
that no sample has. First of all it is told how many samples there are."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...compression.errors import TransportError
from ...pipeline.samples.cache import place
from ...pipeline.samples.cache.storage import TokenBucket
from .beside import beside

CLASSES, SIDE = 10, 16
NOTHING = 0xFFFF_FFFF
MOST_READERS = 256
_NUMBER = struct.Struct("<I")
_PIXELS = 3 * SIDE * SIDE
_SECONDS = 60.0  # that an answer may take


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeUp:
    """Files that are made when they are asked for, always the same: noise of many bytes, of a class each.

    They begin with pixels of which a network can learn the class; ``num_bytes`` is the length of each."""

    num_samples: int
    num_bytes: int = 110_000

    def __len__(self) -> int:
        return self.num_samples

    def read(self, index: int) -> bytes:
        """Return the bytes of a file: its class, its number, its pixels, noise."""
        drawn = np.random.Generator(np.random.SFC64(index))
        noise = np.frombuffer(drawn.bytes(self.num_bytes), np.uint8).copy()
        label = index % CLASSES
        pixels = noise[8 : 8 + _PIXELS]
        pixels //= 2
        pixels[label::CLASSES] += 96
        head = struct.pack("<II", label, index)
        noise[:8] = np.frombuffer(head, np.uint8)
        return noise[: self.num_bytes].tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """The files of a folder, by their names in order."""

    paths: Sequence[Path]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> bytes:
        """Return the bytes of a file."""
        return self.paths[index].read_bytes()


def folder(path: str | Path) -> Listed:
    """The files in ``path`` and the folders below it."""
    return Listed(paths=sorted(file for file in Path(path).rglob("*") if file.is_file()))


class _Server:
    """Answers all readers in one thread."""

    def __init__(self, files: Any, bucket: TokenBucket) -> None:
        self._files, self._bucket, self._readers = files, bucket, set[asyncio.Task[None]]()

    async def serve(self, listener: socket.socket, life: Connection) -> None:
        """Answer until nobody holds the other end of ``life`` any more."""
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(life.fileno(), over.set)
        server = await asyncio.start_unix_server(self._reader, sock=listener)
        life.send(True)
        await over.wait()
        loop.remove_reader(life.fileno())
        server.close()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def _reader(self, asked: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        this = asyncio.current_task()
        assert this is not None
        self._readers.add(this)
        try:
            # It has left, or all is over.
            with contextlib.suppress(asyncio.IncompleteReadError, asyncio.CancelledError, OSError):
                if len(self._readers) <= MOST_READERS and place.is_ours(answers.get_extra_info("socket")):
                    await self._answer(asked, answers)
        finally:
            self._readers.discard(this)
            answers.close()

    async def _answer(self, asked: asyncio.StreamReader, answers: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        answers.write(_NUMBER.pack(len(self._files)))
        while True:
            (index,) = _NUMBER.unpack(await asked.readexactly(_NUMBER.size))
            try:
                data = self._files.read(index) if index < len(self._files) else None
            except OSError:  # a file that is gone, or cannot be read
                data = None
            if data is None:
                answers.write(_NUMBER.pack(NOTHING))
            else:
                now = loop.time()
                await asyncio.sleep(self._bucket.read(len(data), now) - now)
                answers.writelines((_NUMBER.pack(len(data)), data))
            await answers.drain()


def _serve(path: Path, files: Any, bucket: TokenBucket, life: Connection) -> None:
    listener = place.listen(path)
    made = os.lstat(path)
    try:
        asyncio.run(_Server(files, bucket).serve(listener, life))
    finally:
        place.leave(path, made)


@contextlib.contextmanager
def serving(path: Path, files: Any, bucket: TokenBucket) -> Iterator[Path]:
    """A process that serves ``files`` at ``path``; it ends with this block, or with this process.

    Raises: TransportError: it does not begin."""
    with beside("slow store", _serve, path, files, bucket):
        yield path


class SlowSamples(Dataset[Any]):
    """Made-up samples of a store, small images with classes; a process that has none makes a connection.

    ``read`` and ``decode`` tell the sample cache how they become bytes and samples."""

    def __init__(self, address: str | Path, indices: range) -> None:
        self._address, self._indices = Path(address), indices
        self._here: Reader | None = None
        self.classes = [str(number) for number in range(CLASSES)]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.decode(index, self.read(index))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_here": None}

    def read(self, index: int) -> bytes:
        """Return the bytes of a sample.

        Raises: TransportError: there is no such sample, or no store."""
        if self._here is None or self._here.process != os.getpid():
            self._here = Reader(self._address)
        return self._here.read(self._indices[index])

    def decode(self, index: int, data: bytes) -> tuple[Tensor, int]:
        """Return the image and the class of a made-up file."""
        image = torch.frombuffer(bytearray(data[8 : 8 + _PIXELS]), dtype=torch.uint8)
        return image.view(3, SIDE, SIDE).float() / 255 - 0.5, data[0] % CLASSES


class Reader:
    """A connection to a store.

    Attributes: num_samples: that it has. process: whose connection it is.
    Raises:     TransportError: there is none."""

    def __init__(self, address: Path) -> None:
        self.process, self._address = os.getpid(), address
        try:
            self._socket = place.connect(address, _SECONDS)
        except OSError as error:
            raise TransportError(f"no slow store answers at {address} ({error}); start it first") from error
        self.close = weakref.finalize(self, self._socket.close)
        self.num_samples = self._hear()

    def read(self, index: int) -> bytes:
        """Return the bytes of a sample.

        Raises: TransportError: there is none of this number, or the store is gone."""
        try:
            self._socket.sendall(_NUMBER.pack(index))
        except OSError as error:
            raise TransportError(f"the slow store at {self._address} is gone ({error})") from error
        length = self._hear()
        if length == NOTHING:
            raise TransportError(f"the slow store at {self._address} has no sample {index}")
        return bytes(self._bytes(length))

    def _hear(self) -> int:
        return _NUMBER.unpack(self._bytes(_NUMBER.size))[0]

    def _bytes(self, count: int) -> bytearray:
        found, at = bytearray(count), 0
        with memoryview(found) as view:
            while at < count:
                try:
                    more = self._socket.recv_into(view[at:])
                except OSError as error:
                    raise TransportError(f"the slow store at {self._address} is gone ({error})") from error
                if not more:
                    raise TransportError(f"the slow store at {self._address} is gone; start it again")
                at += more
        return found


def samples(*, address: str, first: int = 0, number: int | None = None) -> SlowSamples:
    """Return the samples of a store, for ``data._target_=penstock.scripts.bench.slow_store.samples``.

    Args: address: the path of its socket; first, number: those from one on, None: all that follow."""
    reader = Reader(Path(address))
    end = reader.num_samples if number is None else min(reader.num_samples, first + number)
    reader.close()
    return SlowSamples(address, range(first, end))
