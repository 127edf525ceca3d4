"""``penstock.cached``: any map-style data set through the cache that the training jobs of a machine share."""

from __future__ import annotations

import os
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Sampler

from ...compression.errors import ConfigError
from .cache.client import Client
from .cache.socket_path import default_socket
from .cache.wire import Hello
from .cached import Cache, CachedDataset, Through
from .drawn import order_of
from .options import check_count
from .reads import Reads, reads_of

ENDLESS = 1 << 20  # epochs of who does not say how many
LONGEST_NAME = 200


class Sharing:
    """Where the samples of a run are shared, and under which names.

    Args:    job: the name that a person sees; run: tells two of one name apart; "" for one of its own.
             data: the name of the bytes, where they are not those of files that are told by their paths.
             socket: where the broker listens; None: where it does by default.
             backend: ``redis://HOST:PORT/DB``, in the place of a broker of this machine."""

    def __init__(
        self,
        *,
        job: str,
        run: str = "",
        data: str | None = None,
        socket: str | Path | None = None,
        backend: str | None = None,
    ) -> None:
        self.job, self.run, self.data = job, run or uuid.uuid4().hex, data
        self.socket = Path(socket) if socket else default_socket(os.environ.get("XDG_RUNTIME_DIR"))
        self.backend = backend

    def through(self, reads: Reads, *, num_samples: int, batch_size: int, epochs: int | None) -> Through:
        """Return what brings the samples of ``reads`` through the cache."""
        data = self.data or reads.data or f"{self.job} {self.run}"

        def cache(tell: Callable[[str], None]) -> Cache:
            if self.backend is not None:
                from .cache.redis_client import RedisClient

                return RedisClient(self.backend, data=data, tell=tell)
            counts = {"num_samples": num_samples, "batch_size": batch_size, "epochs": epochs or ENDLESS}
            hello = Hello(job=self.job, run=self.run, data=data, **counts)
            return Client(self.socket, hello, tell=tell)

        return Through(reads, cache)


class SharedOrder(Sampler[int]):
    """The order of each epoch, which the cache is told together with the next one.

    Each pass is an epoch, counted from 0; ``set_epoch`` says which, as torch's DistributedSampler has it."""

    def __init__(self, dataset: Shared) -> None:
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


class Shared(CachedDataset):
    """A data set whose samples come through the cache.

    Attributes: sampler: gives it its order, for ``DataLoader(data, sampler=data.sampler, ...)``."""

    def __init__(
        self, dataset: Any, through: Through, *, shuffle: bool, seed: int, epochs: int | None
    ) -> None:
        super().__init__(dataset, through)
        self.epochs, self._shuffle, self._seed, self._warned = epochs, shuffle, seed, False
        self.sampler = SharedOrder(self)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        samples = super().__getitems__(indices)
        for note in self.through.said():
            if not self._warned:
                self._warned = True
                warnings.warn(note, stacklevel=2)
        return samples

    def order(self, epoch: int) -> Sequence[int]:
        """Return the samples of an epoch in their order, which hangs on the seed alone."""
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
) -> Shared:
    """Read a map-style data set through the sample cache of this machine (``penstock cache serve``).

    The samples are those of the data set, byte for byte; without a broker they are read as ever, and that is
    warned of once. ``DataLoader(data, batch_size=32, sampler=data.sampler, num_workers=2)`` loads it.

    Args:    job: the name of this training job; batch_size: of the loader; epochs: how many passes there will
                  be, None: unknown.
             shuffle, seed: the order of ``sampler``.
             decoded: keep whole samples of a data set that does not tell how it reads and decodes them; the
                  same number must always give the same sample.
             data: names the samples for other jobs, where they are not files that are told by their paths:
                  who says the same gets the same bytes.
             socket, backend: where the cache is: that of a broker, or of a Redis server.
    Raises:  ConfigError: the data set cannot be cached."""
    reads = reads_of(dataset, decoded=decoded)
    check_count(batch_size=batch_size, epochs=1 if epochs is None else epochs)
    if not 0 < len(job) <= LONGEST_NAME or not job.isprintable():
        raise ConfigError(f"a job has a name of 1 to {LONGEST_NAME} printable characters, found {job[:40]!r}")
    if not len(dataset):
        raise ConfigError("a data set without samples has nothing to cache")
    sharing = Sharing(job=job, data=data, socket=socket, backend=backend)
    counts = {"num_samples": len(dataset), "batch_size": batch_size, "epochs": epochs}
    return Shared(dataset, sharing.through(reads, **counts), shuffle=shuffle, seed=seed, epochs=epochs)
