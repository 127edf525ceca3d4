"""One job of the part ``real`` of ``penstock bench cache``: reads and decodes, computes by sleeping, and
counts for itself what was read and what was found.

It uses what a person would: ``penstock.cached`` and torch's ``DataLoader``."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch.utils.data import DataLoader, Dataset

from ...pipeline.samples.cache.loads import Load, Outcome
from ...pipeline.samples.cache.policy import Times
from ...pipeline.samples.drawn import order_of
from ...pipeline.samples.shared import Shared, cached
from .slow_store import samples

_FOUND = -1.0
"""The seconds of reading a sample that was not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one process does.

    Attributes:
        first:  the number of its first sample.
        store:  where the slow store is; folder: or the files. socket: of the broker, None: no cache.
    """

    load: Load
    seed: int
    first: int
    lookahead: int
    store: Path | None
    folder: Path | None
    socket: Path | None


@dataclass(slots=True, kw_only=True)
class Ended:
    """What became of it; ``digest``: of the bytes of all samples, in their order."""

    outcome: Outcome
    digest: int = 0
    waited: list[float] = field(default_factory=list)


class Watched(Dataset[Any]):
    """Of each sample the checksum of its bytes, and the seconds that reading took, if it was read."""

    def __init__(self, files: Any) -> None:
        self._files, self._took = files, dict[int, float]()

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[int, float]:
        return self.decode(index, self.read(index))

    def read(self, index: int) -> bytes:
        """Return the bytes of a sample."""
        began = time.perf_counter()
        data = self._files.read(index)
        self._took[index] = time.perf_counter() - began
        return data

    def decode(self, index: int, data: bytes) -> tuple[int, float]:
        """Return (checksum, seconds)."""
        return crc32(data), self._took.pop(index, _FOUND)


class InFolder(Dataset[Any]):
    """The same of the files of a folder, where what the system has in its page cache counts as found."""

    def __init__(self, folder: Path, first: int, number: int) -> None:
        self._paths = [folder / f"{index:06}" for index in range(first, first + number)]

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[int, float]:
        began = time.perf_counter()
        file = os.open(self._paths[index], os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = bytearray(os.fstat(file).st_size)
            found = _from_page_cache(file, data)
            if not found:
                os.preadv(file, [data], 0)
        finally:
            os.close(file)
        return crc32(data), _FOUND if found else time.perf_counter() - began


def _from_page_cache(file: int, data: bytearray) -> bool:
    """Read what is there without waiting for a disk, see preadv2(2)."""
    try:
        return os.preadv(file, [data], 0, os.RWF_NOWAIT) == len(data)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:  # a file system in memory: all of it is there
            return os.preadv(file, [data], 0) == len(data)
        if error.errno == errno.EAGAIN:
            return False
        raise


def run(job: Job, pipe: Connection) -> None:
    """Say that it is ready, begin at the time that it is told, and say what became of it."""
    load = job.load
    if job.folder is not None:
        data: Any = InFolder(job.folder, job.first, load.num_samples)
    else:
        data = Watched(samples(address=str(job.store), first=job.first, number=load.num_samples))
    if job.socket is not None:
        data = cached(
            data,
            job=load.name,
            batch_size=load.batch_size,
            epochs=load.epochs,
            seed=job.seed,
            data=load.reads,
            socket=job.socket,
        )
    pipe.send(True)
    zero = pipe.recv()
    begin = zero + load.start
    time.sleep(max(0.0, begin - time.monotonic()))
    ended = Ended(outcome=Outcome(name=load.name, begin=load.start))
    for epoch in range(load.epochs):
        _epoch(job, data, epoch, ended)
        if not epoch and isinstance(data, Shared):
            data.through.cache.measured(_measured(job, ended.outcome, time.monotonic() - begin))
    if isinstance(data, Shared):
        data.through.cache.close()
    ended.outcome.end = time.monotonic() - zero
    pipe.send(ended)


def _epoch(job: Job, data: Any, epoch: int, ended: Ended) -> None:
    """Load and compute all batches, as the simulator has it: a process loads so many batches ahead."""
    load, outcome = job.load, ended.outcome
    order: Sequence[int] = order_of(load.num_samples, seed=job.seed, epoch=epoch).tolist()
    # Forked, as torch does by itself in a process that was not forked from a server.
    ahead = {"num_workers": 1, "prefetch_factor": job.lookahead, "multiprocessing_context": "fork"}
    batches = iter(
        DataLoader(
            data,
            load.batch_size,
            sampler=data.sampler if isinstance(data, Shared) else order,  # pyright: ignore[reportArgumentType]
            generator=torch.Generator(),
            **(ahead if job.lookahead else {}),
        )
    )
    outcome.uses.append(load.num_samples)
    outcome.hits.append(0)
    while True:
        began = time.monotonic()
        batch = next(batches, None)
        if batch is None:
            break
        outcome.stalled += time.monotonic() - began
        checksums, seconds = batch
        ended.digest = crc32(checksums.numpy().tobytes(), ended.digest)
        read = seconds[seconds != _FOUND]
        outcome.loads += len(read)
        outcome.hits[-1] += len(seconds) - len(read)
        outcome.reading += float(read.sum())
        outcome.computing += load.training
        time.sleep(load.training)


def _measured(job: Job, outcome: Outcome, epoch: float) -> Times:
    """What the first epoch has shown, as the simulator has it."""
    sample_io, training = outcome.reading / max(1, outcome.loads), job.load.training
    return Times(
        epoch=epoch,
        batch_io=sample_io * job.load.batch_size,
        sample_io=sample_io,
        augmentation=0.0,
        training=training,
        hidden=training if job.lookahead else 0.0,
    )
