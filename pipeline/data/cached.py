"""Data sets whose samples come through the sample cache: the same bytes, read from storage less often.

Kept are the bytes of files where a data set tells how it reads and decodes one, so that what is drawn while
decoding is drawn anew each time; else, if asked, whole samples, of which none is kept that drew anything."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import struct
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.utils.data import Dataset, IterableDataset, Sampler, Subset

from ...compression.errors import ConfigError
from .cache.client import Client
from .cache.sample_bytes import from_bytes, to_bytes
from .cache.wire import Hello, default_socket
from .options import check_count
from .random_draws import generators, order_of, own_generators

if TYPE_CHECKING:
    from .cache.redis_client import RedisClient


_STAMP = struct.Struct("<qq")  # bytes and nanoseconds of a file
ENDLESS = 1 << 20  # epochs of a job that does not name a number
LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class FileSamples:
    """Samples that are decoded from the bytes of files, or of anything else that ``read(index)`` returns."""

    read: Callable[[int], bytes]
    decode: Callable[[int, bytes], Any]
    path: Callable[[int], str] | None  # None: there are no files, and jobs share nothing by themselves
    reader: str  # name of the code that reads the files: another may make other bytes of them

    def name(self, num_samples: int) -> str:
        """Return the name of the bytes, for jobs that may share them; "" where it cannot be determined."""
        if self.path is None:
            return ""
        names = hashlib.blake2b(self.reader.encode(errors="surrogateescape"), digest_size=16)
        for index in range(num_samples):
            names.update(f"{os.path.abspath(self.path(index))}\0".encode(errors="surrogateescape"))
        return f"files {names.hexdigest()}"

    def load(self, index: int) -> tuple[bytes | None, Any]:
        """Return the bytes of a file; they are decoded by whoever asks."""
        return self.read(index), None

    def stamp(self, index: int) -> bytes:
        """Return size and time of the file, which change where the sample does; nothing where it has none."""
        if self.path is not None:
            with contextlib.suppress(OSError):
                status = os.stat(self.path(index))
                return _STAMP.pack(status.st_size, status.st_mtime_ns)
        return b""


class WholeSamples:
    """Samples of a data set that has nothing else, kept as they are."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def name(self, num_samples: int) -> str:
        """Return nothing: only their owner can name them."""
        return ""

    def load(self, index: int) -> tuple[bytes | None, Any]:
        """Return a sample; its bytes only if nothing was drawn and they are sure to come back the same."""
        own = own_generators(self._dataset)
        before, sample = generators(own), self._dataset[index]
        return to_bytes(sample) if before == generators(own) else None, sample

    def decode(self, index: int, data: bytes) -> Any:
        """Return the sample of these bytes."""
        return from_bytes(data)

    def stamp(self, index: int) -> bytes:
        """Return nothing: a change cannot be seen."""
        return b""


Source = FileSamples | WholeSamples


def sample_source(dataset: Any, *, decoded: bool) -> Source:
    """Return how the samples of a data set become bytes, and bytes become exactly the same samples.

    Args:
        decoded: Keep whole samples where it does not tell how it reads and decodes them.

    Raises:
        ConfigError: It does not, and that was not asked for."""
    if (files := _files_of(dataset)) is not None:
        return files
    if isinstance(dataset, IterableDataset) or not (
        hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    ):  # torch gives an iterable one a __getitem__ that raises
        raise ConfigError(
            f"the sample cache is for samples with a number, found a {type(dataset).__name__}, which has an "
            "order of its own only; leave cache= out"
        )
    if not decoded:
        raise ConfigError(
            f"a {type(dataset).__name__} has no read(index) -> bytes and decode(index, bytes), so only whole "
            "samples could be kept; if a number always gives the same sample, say so by cache.decoded=true "
            "(penstock.cached(..., decoded=True))"
        )
    return WholeSamples(dataset)


def _files_of(dataset: Any) -> FileSamples | None:
    """Return the files of a data set; None: it does not tell how it reads and decodes."""
    kinds = type(dataset).__mro__
    # 1. Itself, unless a __getitem__ overrides the two, or a wrapper passes on attributes that it lacks.
    read, decode, item = (
        next((place for place, kind in enumerate(kinds) if name in vars(kind)), len(kinds))
        for name in ("read", "decode", "__getitem__")
    )
    if max(read, decode) < len(kinds) and min(read, decode) <= item:
        code = getattr(type(dataset).read, "__code__", None)
        file = code.co_filename if code else type(dataset).read.__module__
        changed = os.stat(file).st_mtime_ns if os.path.isfile(file) else 0  # other code reads other bytes
        reader = f"{file}:{changed}:{type(dataset).read.__qualname__}\0"
        return FileSamples(dataset.read, dataset.decode, getattr(dataset, "path", None), reader)
    # 2. A part of one.
    if type(dataset) is Subset:
        whole = _files_of(dataset.dataset)
        if whole is None:
            return None
        read, decode = partial(_at, whole.read, dataset.indices), partial(_at, whole.decode, dataset.indices)
        path = None if whole.path is None else partial(_at, whole.path, dataset.indices)
        return FileSamples(read, decode, path, whole.reader)
    # 3. A folder of torchvision, with its own loader and transforms.
    folder = next((one for one in kinds if one.__module__ == "torchvision.datasets.folder"), None)
    if folder is not None and hasattr(dataset, "loader"):
        from torchvision import get_image_backend

        plain = type(dataset).__getitem__ is folder.__getitem__ and get_image_backend() == "PIL"
        if plain and getattr(dataset.loader, "__module__", "") == folder.__module__:
            read, decode = partial(_read_image, dataset), partial(_decode_image, dataset)
            return FileSamples(read, decode, partial(_image_path, dataset), _read_image.__qualname__)
    return None


def _at(function: Callable[..., Any], indices: Sequence[int], index: int, *data: bytes) -> Any:
    return function(indices[index], *data)


def _image_path(folder: Any, index: int) -> str:
    return folder.samples[index][0]


def _read_image(folder: Any, index: int) -> bytes:
    return Path(_image_path(folder, index)).read_bytes()


def _decode_image(folder: Any, index: int, data: bytes) -> tuple[Any, Any]:
    from PIL import Image

    sample, target = Image.open(io.BytesIO(data)).convert("RGB"), folder.samples[index][1]
    if folder.transform is not None:
        sample = folder.transform(sample)
    return sample, target if folder.target_transform is None else folder.target_transform(target)


class Counts(NamedTuple):
    """Samples found in the cache and read, bytes of the former, seconds of reading."""

    hits: int = 0
    loads: int = 0
    hit_bytes: int = 0
    seconds: float = 0.0


class CacheReader:
    """Reader of one data set through the client that ``cache`` makes; it ``counts`` what it reads."""

    def __init__(
        self, source: Source, cache: Callable[[Callable[[str], None]], Client | RedisClient]
    ) -> None:
        self.source, self.counts = source, Counts()
        self._notes: list[str] = []
        self.cache = cache(self._notes.append)
        self.epoch: int | None = None

    def begin(self, epoch: int, orders: Callable[[int], Sequence[int]], *, last: bool) -> None:
        """Begin an epoch, for this process; ``orders`` returns the samples that the run uses in one."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.cache.begin(epoch, orders(epoch), None if last else orders(epoch + 1))

    def take_notes(self) -> tuple[str, ...]:
        """Return what the cache had to tell since this was asked last."""
        notes = tuple(self._notes)
        self._notes.clear()
        return notes

    def payloads(self, indices: Sequence[int]) -> list[bytes]:
        """Return the bytes of samples, of a data set whose samples are files."""
        return [data for data, _ in self._read(indices)]

    def samples(self, indices: Sequence[int]) -> list[Any]:
        """Return samples."""
        return [
            sample if data is None or sample is not None else self.source.decode(index, data)
            for index, (data, sample) in zip(indices, self._read(indices), strict=True)
        ]

    def _read(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return for every index its bytes, or its sample where that is there already."""
        rows, offers = list[tuple[Any, Any]](), list[tuple[int, bytes, bytes]]()
        hits, hit_bytes, seconds = 0, 0, 0.0
        for index, hit in zip(indices, self.cache.use(indices, epoch=self.epoch), strict=True):
            stamp = self.source.stamp(index)
            if hit is not None and hit.stamp == stamp:
                rows.append((hit.payload, None))
                hits, hit_bytes = hits + 1, hit_bytes + len(hit.payload)
                continue
            if hit is not None:
                self.cache.drop(index, hit.stamp)
            began = time.perf_counter()
            data, sample = self.source.load(index)
            seconds += time.perf_counter() - began
            rows.append((data, sample))
            if data is not None and self.source.stamp(index) == stamp:
                offers.append((index, data, stamp))
        if offers:
            self.cache.store(*map(list, zip(*offers, strict=True)), epoch=self.epoch)
        self.counts = Counts._make(map(add, self.counts, (hits, len(indices) - hits, hit_bytes, seconds)))
        return rows


class CachedDataset(Dataset[Any]):
    """A map-style data set that asks the cache first; ``DataLoader`` asks it for whole batches."""

    def __init__(self, dataset: Any, through: CacheReader) -> None:
        self.dataset, self.through = dataset, through

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        numbers = range(len(self))  # counts from the end as lists do, and raises IndexError beyond
        return self.through.samples([numbers[index] for index in indices])


def cache_reader(
    source: Source,
    *,
    job: str,
    num_samples: int,
    batch_size: int,
    epochs: int | None,
    run: str = "",
    data: str | None = None,
    socket: str | Path | None = None,
    backend: str | None = None,
    share: float | None = None,
) -> CacheReader:
    """Return the reader of a run; for arguments see ``cached`` and ``Hello``.

    Args:
        run: Tells two runs of one name apart; "": a new name.
        socket: The broker's; None: that of the user.
        backend: ``redis://HOST:PORT/DB``, in the place of a broker of this machine."""
    run = run or uuid.uuid4().hex
    data = data or source.name(num_samples) or f"{job} {run}"
    if backend is not None:
        from .cache.redis_client import RedisClient

        return CacheReader(source, lambda tell: RedisClient(backend, data=data, tell=tell))
    path = Path(socket) if socket else default_socket(os.environ.get("XDG_RUNTIME_DIR"))
    counts = {"num_samples": num_samples, "batch_size": batch_size, "epochs": epochs or ENDLESS}
    hello = Hello(job=job, run=run, data=data, share=share, **counts)
    return CacheReader(source, lambda tell: Client(path, hello, tell=tell))


class EpochSampler(Sampler[int]):
    """The order of each epoch, which the cache learns together with the next one; a pass is an epoch."""

    def __init__(self, dataset: Cached) -> None:
        self._dataset, self._epoch = dataset, 0

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[int]:
        data, epoch = self._dataset, self._epoch
        self._epoch += 1
        last = data.epochs is not None and epoch + 1 >= data.epochs
        # At once, ahead of what is loaded; a process that stays over epochs asks for that which began last.
        data.through.cache.begin(epoch, data.order(epoch), None if last else data.order(epoch + 1))
        return iter(data.order(epoch))

    def set_epoch(self, epoch: int) -> None:
        """Begin ``epoch`` with the next pass, as torch's DistributedSampler has it."""
        self._epoch = epoch


class Cached(CachedDataset):
    """A data set whose samples come through the cache, in the order of ``sampler``."""

    def __init__(
        self, dataset: Any, through: CacheReader, *, shuffle: bool, seed: int, epochs: int | None
    ) -> None:
        super().__init__(dataset, through)
        self.epochs, self._shuffle, self._seed, self._has_warned = epochs, shuffle, seed, False
        self.sampler = EpochSampler(self)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        samples = super().__getitems__(indices)
        for note in self.through.take_notes():
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(note, stacklevel=2)
        return samples

    def order(self, epoch: int) -> Sequence[int]:
        """Return the samples of an epoch in their order, which depends on the seed alone."""
        if not self._shuffle:
            return list(range(len(self)))
        return order_of(len(self), seed=self._seed, epoch=epoch).tolist()


def cached(
    dataset: Any,
    *,
    job: str,
    batch_size: int = 1,
    epochs: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    decoded: bool = False,
    data: str | None = None,
    socket: str | Path | None = None,
    backend: str | None = None,
) -> Cached:
    """Read a map-style data set through the sample cache of this machine (``penstock cache serve``).

    The samples are those of the data set, byte for byte; without a broker they are read as ever, with one
    warning. ``DataLoader(data, batch_size=32, sampler=data.sampler, num_workers=2)`` loads it.

    Args:
        job: Name of this training job.
        batch_size: Of the loader.
        epochs: How many passes there will be; None: unknown.
        shuffle: ``sampler`` has another order in every epoch.
        seed: That of these orders.
        decoded: Keep whole samples of a data set that does not tell how it reads and decodes them; the same
            number must always give the same sample.
        data: Name of the samples for other jobs, where they are not files that are told by their paths: the
            same name gets the same bytes.
        socket: Where the broker listens; None: where it does by default.
        backend: A Redis server in its place: "redis://HOST:PORT/DB".

    Raises:
        ConfigError: The data set cannot be cached."""
    source = sample_source(dataset, decoded=decoded)
    check_count(batch_size=batch_size, epochs=1 if epochs is None else epochs)
    if not 0 < len(job) <= LONGEST_NAME or not job.isprintable():
        raise ConfigError(f"a job has a name of 1 to {LONGEST_NAME} printable characters, found {job[:40]!r}")
    if not len(dataset):
        raise ConfigError("a data set without samples has nothing to cache")
    options: Any = {"batch_size": batch_size, "epochs": epochs, "socket": socket, "backend": backend}
    reader = cache_reader(source, job=job, num_samples=len(dataset), data=data, **options)
    return Cached(dataset, reader, shuffle=shuffle, seed=seed, epochs=epochs)
