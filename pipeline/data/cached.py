"""Data sets whose samples come through the sample cache: the same bytes, read from storage less often.

Kept are the bytes of files where a data set tells how it reads and decodes one, so that what is drawn while
decoding is drawn anew each time; else, if asked, whole samples, of which none is kept that drew anything."""

from __future__ import annotations

import hashlib
import io
import os
import struct
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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


class Reads(Protocol):
    """Reader of samples as bytes, and decoder of bytes.

    Attributes: data: names the bytes, for jobs that may share them; "" where it cannot be determined."""

    data: str

    def load(self, index: int) -> tuple[bytes | None, Any]:
        """Return the bytes of a sample, None if they are not to be kept, and the sample where it is there."""
        ...

    def decode(self, index: int, data: bytes) -> Any:
        """Return the sample of these bytes."""
        ...

    def stamp(self, index: int) -> bytes:
        """Return what changes where the sample does; nothing where nobody can tell."""
        ...


class Files:
    """Reads of a data set with ``read(index)``, ``decode(index, data)`` and, where it has files, ``path``.

    What reads the files is part of their name: another may make other bytes of them."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.data = ""
        if hasattr(dataset, "path"):
            names = hashlib.blake2b(_reader(dataset).encode(errors="surrogateescape"), digest_size=16)
            for index in range(len(dataset)):
                names.update(f"{os.path.abspath(dataset.path(index))}\0".encode(errors="surrogateescape"))
            self.data = f"files {names.hexdigest()}"

    def load(self, index: int) -> tuple[bytes | None, Any]:
        """Return the bytes of a file; they are decoded by whoever asks."""
        return self._dataset.read(index), None

    def decode(self, index: int, data: bytes) -> Any:
        """Return the sample."""
        return self._dataset.decode(index, data)

    def stamp(self, index: int) -> bytes:
        """Return size and time of the file; nothing where it has none."""
        if not self.data:
            return b""
        try:
            found = os.stat(self._dataset.path(index))
        except OSError:
            return b""
        return _STAMP.pack(found.st_size, found.st_mtime_ns)


class Folder:
    """``read`` and ``decode`` of torchvision's folders of images, with their own loader and transforms."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def path(self, index: int) -> str:
        """Return the file of an image."""
        return self._dataset.samples[index][0]

    def read(self, index: int) -> bytes:
        """Return the bytes of the file."""
        return Path(self.path(index)).read_bytes()

    def decode(self, index: int, data: bytes) -> Any:
        """Return (image, class), transformed."""
        from PIL import Image

        whole, (_, target) = self._dataset, self._dataset.samples[index]
        sample = Image.open(io.BytesIO(data)).convert("RGB")  # as torchvision's own loader does of a path
        if whole.transform is not None:
            sample = whole.transform(sample)
        return sample, target if whole.target_transform is None else whole.target_transform(target)


class Part:
    """``read`` and ``decode`` of a ``Subset``."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self.whole, self._indices = dataset, indices
        if hasattr(dataset, "path"):
            self.path: Callable[[int], str] = self._path

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, index: int) -> bytes:
        """Return the bytes of a sample."""
        return self.whole.read(self._indices[index])

    def decode(self, index: int, data: bytes) -> Any:
        """Return the sample of these bytes."""
        return self.whole.decode(self._indices[index], data)

    def _path(self, index: int) -> str:
        return self.whole.path(self._indices[index])


class Whole:
    """Reads of a data set that only has samples, which are kept as they are."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.data = dataset, ""

    def load(self, index: int) -> tuple[bytes | None, Any]:
        """Return a sample; its bytes only if nothing was drawn and they are sure to come back the same."""
        own = own_generators(self._dataset)
        before = generators(own)
        sample = self._dataset[index]
        drawn = before != generators(own)
        return None if drawn else to_bytes(sample), sample

    def decode(self, index: int, data: bytes) -> Any:
        """Return the sample of these bytes."""
        return from_bytes(data)

    def stamp(self, index: int) -> bytes:
        """Nobody can tell."""
        return b""


def reads_of(dataset: Any, *, decoded: bool) -> Reads:
    """Return how a data set is read.

    Args:    decoded: keep whole samples where it does not tell how it reads and decodes them.
    Raises:  ConfigError: it does not, and that was not asked for."""
    if (files := _files_of(dataset)) is not None:
        return Files(files)
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
    return Whole(dataset)


def _files_of(dataset: Any) -> Any:
    """Object with ``read`` and ``decode``: a data set itself, or an adapter of it."""
    if _tells(dataset):
        return dataset
    if type(dataset) is Subset:
        inner = _files_of(dataset.dataset)
        return None if inner is None else Part(inner, dataset.indices)
    kinds = type(dataset).__mro__
    folder = next((one for one in kinds if one.__module__ == "torchvision.datasets.folder"), None)
    if folder is not None and hasattr(dataset, "loader"):
        plain = type(dataset).__getitem__ is folder.__getitem__
        if plain and getattr(dataset.loader, "__module__", "") == folder.__module__ and _by_pillow():
            return Folder(dataset)
    return None


def _reader(dataset: Any) -> str:
    """Name and place of the function that reads the files of a data set."""
    while isinstance(dataset, Part):
        dataset = dataset.whole
    read = type(dataset).read
    code = getattr(read, "__code__", None)
    return f"{code.co_filename if code else read.__module__}:{read.__qualname__}\0"


def _tells(dataset: Any) -> bool:
    """True if ``read`` and ``decode`` give its samples.

    They do not where something overrides them: a ``__getitem__`` further down than both, or a wrapper that
    only passes on attributes that it lacks."""
    kinds = type(dataset).__mro__
    places = [
        next((place for place, kind in enumerate(kinds) if name in vars(kind)), len(kinds))
        for name in ("read", "decode", "__getitem__")
    ]
    return max(places[:2]) < len(kinds) and min(places[:2]) <= places[2]


def _by_pillow() -> bool:
    from torchvision import get_image_backend

    return get_image_backend() == "PIL"


ENDLESS = 1 << 20  # epochs of who does not say how many
LONGEST_NAME = 200


class Counts(NamedTuple):
    """Samples found in the cache and read, bytes of the former, seconds of reading."""

    hits: int = 0
    loads: int = 0
    hit_bytes: int = 0
    seconds: float = 0.0

    def plus(self, other: Counts) -> Counts:
        """Return the sums."""
        return Counts._make(a + b for a, b in zip(self, other, strict=True))

    def less(self, other: Counts) -> Counts:
        """Return the differences."""
        return Counts._make(a - b for a, b in zip(self, other, strict=True))


class CacheReader:
    """Reader of one data set through a cache, a batch at a time, in whatever process it is.

    Args:
        cache: Makes the client of what holds samples, which tells its argument why there is no cache.

    Attributes:
        counts: What was read so far, in this process.
    """

    def __init__(self, reads: Reads, cache: Callable[[Callable[[str], None]], Client | RedisClient]) -> None:
        self.reads, self.counts = reads, Counts()
        self._notes: list[str] = []
        self.cache = cache(self._note)
        self.epoch: int | None = None

    def begin(self, epoch: int, orders: Callable[[int], Sequence[int]], *, last: bool) -> None:
        """Begin an epoch, for this process; ``orders``: of an epoch, the samples that the run uses in it."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.cache.begin(epoch, orders(epoch), None if last else orders(epoch + 1))

    def take_notes(self) -> tuple[str, ...]:
        """Return what the cache had to tell since this was asked last."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def payloads(self, indices: Sequence[int]) -> list[bytes]:
        """Return the bytes of samples, of a data set whose samples are files."""
        return [data for data, _ in self._read(indices)]

    def samples(self, indices: Sequence[int]) -> list[Any]:
        """Return samples."""
        return [
            sample if data is None or sample is not None else self.reads.decode(index, data)
            for index, (data, sample) in zip(indices, self._read(indices), strict=True)
        ]

    def _note(self, sentence: str) -> None:
        self._notes.append(sentence)

    def _read(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """Return for every index its bytes, or its sample where that is there already."""
        rows: list[tuple[Any, Any]] = []
        offers: list[tuple[int, bytes, bytes]] = []
        hits = hit_bytes = 0
        seconds = 0.0
        for index, hit in zip(indices, self.cache.use(indices, epoch=self.epoch), strict=True):
            stamp = self.reads.stamp(index)
            if hit is not None and hit.stamp == stamp:
                rows.append((hit.payload, None))
                hits, hit_bytes = hits + 1, hit_bytes + len(hit.payload)
                continue
            if hit is not None:
                self.cache.drop(index, hit.stamp)
            began = time.perf_counter()
            data, sample = self.reads.load(index)
            seconds += time.perf_counter() - began
            rows.append((data, sample))
            if data is not None and self.reads.stamp(index) == stamp:
                offers.append((index, data, stamp))
        if offers:
            self.cache.store(*map(list, zip(*offers, strict=True)), epoch=self.epoch)
        self.counts = self.counts.plus(Counts(hits, len(indices) - hits, hit_bytes, seconds))
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
    reads: Reads,
    *,
    job: str,
    num_samples: int,
    batch_size: int,
    epochs: int | None,
    run: str = "",
    data: str | None = None,
    socket: str | Path | None = None,
    backend: str | None = None,
) -> CacheReader:
    """Return the reader of a run.

    Args:
        job: Name that a person sees.
        run: Tells two runs of one name apart; "": one of its own.
        data: Name of the bytes, where they are not those of files that are told by their paths.
        socket: The broker's; None: that of the user.
        backend: ``redis://HOST:PORT/DB``, in the place of a broker of this machine.
    """
    run = run or uuid.uuid4().hex
    data = data or reads.data or f"{job} {run}"
    if backend is not None:
        from .cache.redis_client import RedisClient

        return CacheReader(reads, lambda tell: RedisClient(backend, data=data, tell=tell))
    path = Path(socket) if socket else default_socket(os.environ.get("XDG_RUNTIME_DIR"))
    counts = {"num_samples": num_samples, "batch_size": batch_size, "epochs": epochs or ENDLESS}
    hello = Hello(job=job, run=run, data=data, **counts)
    return CacheReader(reads, lambda tell: Client(path, hello, tell=tell))


class EpochSampler(Sampler[int]):
    """The order of each epoch, which the cache learns together with the next one.

    Each pass is an epoch, counted from 0; ``set_epoch`` sets it, as torch's DistributedSampler has it."""

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
        """Begin ``epoch`` with the next pass."""
        self._epoch = epoch


class Cached(CachedDataset):
    """A data set whose samples come through the cache.

    Attributes:
        sampler: Its order, for ``DataLoader(data, sampler=data.sampler, ...)``.
    """

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
        shuffle, seed: Order of ``sampler``.
        decoded: Keep whole samples of a data set that does not tell how it reads and decodes them; the same
            number must always give the same sample.
        data: Name of the samples for other jobs, where they are not files that are told by their paths: the
            same name gets the same bytes.
        socket, backend: Where the cache is: that of a broker, or of a Redis server.

    Raises:
        ConfigError: The data set cannot be cached.
    """
    reads = reads_of(dataset, decoded=decoded)
    check_count(batch_size=batch_size, epochs=1 if epochs is None else epochs)
    if not 0 < len(job) <= LONGEST_NAME or not job.isprintable():
        raise ConfigError(f"a job has a name of 1 to {LONGEST_NAME} printable characters, found {job[:40]!r}")
    if not len(dataset):
        raise ConfigError("a data set without samples has nothing to cache")
    where: Any = {"data": data, "socket": socket, "backend": backend}
    counts: Any = {"num_samples": len(dataset), "batch_size": batch_size, "epochs": epochs}
    reader = cache_reader(reads, job=job, **counts, **where)
    return Cached(dataset, reader, shuffle=shuffle, seed=seed, epochs=epochs)
