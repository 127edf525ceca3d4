"""A data set whose samples come through the sample cache: the same bytes, read from storage less often.

Kept are the bytes of files where a data set tells how it reads and decodes one, so that what is drawn while
decoding is drawn anew each time; else, if asked, whole samples, of which none is kept that drew anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch.utils.data import Dataset

from .cache.client import Hit
from .cache.policy import Times
from .reads import Reads


class Counts(NamedTuple):
    """What came through the cache: samples found there and read, bytes of the former, seconds of reading."""

    hits: int = 0
    loads: int = 0
    hit_bytes: int = 0
    seconds: float = 0.0

    def plus(self, other: Counts) -> Counts:
        """Return the sums."""
        return Counts._make(a + b for a, b in zip(self, other, strict=True))

    def less(self, other: Counts) -> Counts:
        """Return what came since ``other``."""
        return Counts._make(a - b for a, b in zip(self, other, strict=True))


class Cache(Protocol):
    """What holds samples: a client of the broker, or of a server."""

    def begin(self, epoch: int, order: Sequence[int], following: Sequence[int] | None) -> None:
        """An epoch of this run begins."""
        ...

    def measured(self, times: Times) -> None:
        """The warm-up epoch is over."""
        ...

    def use(self, indices: Sequence[int], *, epoch: int | None = None) -> Sequence[Hit | None]:
        """Return what there is of a batch."""
        ...

    def store(
        self,
        indices: Sequence[int],
        payloads: Sequence[bytes],
        stamps: Sequence[bytes] | None = None,
        *,
        epoch: int | None = None,
    ) -> int:
        """Offer what was not there and was read."""
        ...

    def drop(self, index: int, stamp: bytes) -> None:
        """A sample is no longer what it was."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


class Through:
    """Brings samples of one data set through a cache, a batch at a time, in whatever process it is.

    Attributes: counts: what came so far, in this process."""

    def __init__(self, reads: Reads, cache: Callable[[Callable[[str], None]], Cache]) -> None:
        """``cache``: makes what holds samples, which says through its argument why it does not."""
        self.reads, self.counts = reads, Counts()
        self._notes: list[str] = []
        self.cache = cache(self._note)
        self.epoch: int | None = None

    def begin(self, epoch: int, orders: Callable[[int], Sequence[int]], *, last: bool) -> None:
        """An epoch begins, for this process; ``orders``: of an epoch, the samples that the run uses in it."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.cache.begin(epoch, orders(epoch), None if last else orders(epoch + 1))

    def said(self) -> tuple[str, ...]:
        """Return what the cache had to say since this was asked last."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def payloads(self, indices: Sequence[int]) -> list[bytes]:
        """Return the bytes of samples, of a data set whose samples are files."""
        return [data for data, _ in self._brought(indices)]

    def samples(self, indices: Sequence[int]) -> list[Any]:
        """Return samples."""
        return [
            sample if data is None or sample is not None else self.reads.decode(index, data)
            for index, (data, sample) in zip(indices, self._brought(indices), strict=True)
        ]

    def _note(self, sentence: str) -> None:
        self._notes.append(sentence)

    def _brought(self, indices: Sequence[int]) -> list[tuple[Any, Any]]:
        """For every index its bytes, or its sample where that is there already."""
        brought: list[tuple[Any, Any]] = []
        offered: list[tuple[int, bytes, bytes]] = []
        hits = hit_bytes = 0
        seconds = 0.0
        for index, hit in zip(indices, self.cache.use(indices, epoch=self.epoch), strict=True):
            stamp = self.reads.stamp(index)
            if hit is not None and hit.stamp == stamp:
                brought.append((hit.payload, None))
                hits, hit_bytes = hits + 1, hit_bytes + len(hit.payload)
                continue
            if hit is not None:
                self.cache.drop(index, hit.stamp)
            began = time.perf_counter()
            data, sample = self.reads.load(index)
            seconds += time.perf_counter() - began
            brought.append((data, sample))
            if data is not None and self.reads.stamp(index) == stamp:
                offered.append((index, data, stamp))
        if offered:
            self.cache.store(*map(list, zip(*offered, strict=True)), epoch=self.epoch)
        self.counts = self.counts.plus(Counts(hits, len(indices) - hits, hit_bytes, seconds))
        return brought


class CachedDataset(Dataset[Any]):
    """A map-style data set that asks the cache first; ``DataLoader`` asks it for whole batches."""

    def __init__(self, dataset: Any, through: Through) -> None:
        self.dataset, self.through = dataset, through

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        numbers = range(len(self))  # counts from the end as lists do, and raises IndexError beyond
        return self.through.samples([numbers[index] for index in indices])
