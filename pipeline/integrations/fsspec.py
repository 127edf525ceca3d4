"""Files of anything that reads by fsspec, through the sample cache of this machine.

    fsspec.open("penstock::https://host/part-0.parquet")     # or penstock:///mnt/part-0.parquet

A file is a data set whose samples are its blocks. Each time it is opened an epoch begins, in the order of the
file. Processes that read one file share its blocks. Its name has what the file system says of the file (size
and time, or an ETag), so that one that changed is read anew."""
# ruff: noqa: D102 (methods are those of AbstractFileSystem)

import hashlib
import os
import threading
import uuid
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.chained import ChainedFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from ...compression.errors import ConfigError
from ..data.cached import CacheReader, FileSamples, cache_reader

MOST_FILES = 256  # whose connections to the broker stay, and so their blocks
IN_MEMORY = 4  # blocks that a file keeps while it is open


def _name_of(fs: Any) -> str:
    """Return a name that a file system has in all processes, or one of its own where it has none."""
    try:
        return fs.to_json()
    except (TypeError, ValueError, NotImplementedError):  # made of what is no JSON
        return uuid.uuid4().hex


class _File(AbstractBufferedFile):
    """One opened file; the lock is for all that have it open."""

    def __init__(self, fs: Any, path: str, *, size: int, reader: CacheReader, lock: threading.Lock) -> None:
        self._reader, self._lock = reader, lock
        few = {"maxblocks": IN_MEMORY}
        super().__init__(fs, path, "rb", fs.block_size, cache_type="blockcache", cache_options=few, size=size)

    def _fetch_range(self, start: int, end: int) -> bytes:
        block = self.fs.block_size
        first, last = start // block, -(-end // block)
        with self._lock:
            data = b"".join(self._reader.payloads(range(first, last)))
            for note in self._reader.take_notes():
                warnings.warn(note, stacklevel=2)
        return data[start - first * block : end - first * block]


class PenstockFileSystem(ChainedFileSystem):
    """Reads files of another file system through the broker that ``penstock cache serve`` started.

    Args:
        target_protocol: the other file system's; ``target_options``: its arguments.
        fs: the other file system itself, in the place of both.
        socket: where the broker listens; None: where it does by default.
        block_size: bytes that are read and kept at once."""

    protocol = "penstock"

    def __init__(
        self, target_protocol: str | None = None, target_options: dict[str, Any] | None = None,
        fo: Any = None, *, fs: Any = None, socket: str | Path | None = None, block_size: int = 1 << 20,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**options)
        self.fs = fs or fsspec.filesystem(target_protocol or "file", **(target_options or {}))
        self.socket, self.block_size, self._home = socket, block_size, _name_of(self.fs)
        self._readers: OrderedDict[str, tuple[CacheReader, threading.Lock]] = OrderedDict()
        self._lock = threading.Lock()

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self.fs.ls(self._there(path), detail=detail, **options)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return self.fs.info(self._there(path), **options)

    def _there(self, path: str) -> str:
        """Return the path in the other file system; a local one begins at the root, as in file:///path."""
        is_local = isinstance(self.fs, LocalFileSystem) and not path.startswith("/")
        return f"/{path}" if is_local else path

    def _open(self, path: str, mode: str = "rb", *more: Any, **options: Any) -> Any:
        if mode != "rb":
            raise ConfigError(f"penstock:: files are read, found mode {mode}; write to the other file system")
        path = self._there(path)
        info = self.fs.info(path)
        if not (size := info.get("size")):  # none, or nobody knows how many bytes
            return self.fs.open(path, "rb")
        num_blocks = -(-size // self.block_size)
        text = f"{self._home} {path} {sorted(info.items(), key=str)} {self.block_size}"
        digest = hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()
        with self._lock:
            reader, lock = self._reader_of(f"fsspec {digest}", path, num_blocks)
        with lock:
            epoch = 0 if reader.epoch is None else reader.epoch + 1
            reader.begin(epoch, lambda _: range(num_blocks), last=False)
        return _File(self, path, size=size, reader=reader, lock=lock)

    def _reader_of(self, name: str, path: str, num_blocks: int) -> tuple[CacheReader, threading.Lock]:
        """Return the reader of a file, and the lock of all that have it open; of too many, one is closed."""
        if name not in self._readers:
            fs, size = self.fs, self.block_size
            blocks = FileSamples(  # all that is known of the file is in the name of the data
                read=lambda index: fs.cat_file(path, start=index * size, end=(index + 1) * size),
                decode=lambda index, data: data, path=None, reader="",
            )  # fmt: skip
            reader = cache_reader(
                blocks, job=f"fsspec {os.getpid()}", num_samples=num_blocks, batch_size=1, epochs=None,
                data=name, socket=self.socket,
            )  # fmt: skip
            self._readers[name] = reader, threading.Lock()
            if len(self._readers) > MOST_FILES:
                oldest, lock = self._readers.popitem(last=False)[1]
                with lock:
                    oldest.cache.close()
        self._readers.move_to_end(name)
        return self._readers[name]
