"""The part ``hit`` of ``penstock bench cache``: microseconds of a sample that is in the cache, in batches,
beside a plain read of a file that the system has in its page cache."""

from __future__ import annotations

import contextlib
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...compression.errors import TransportError
from ...conf.bench_cache import BenchCacheConfig
from ...pipeline.samples.cache.client import Client
from ...pipeline.samples.cache.messages import Hello
from ...pipeline.samples.cache.policies import DEFAULT
from ...stages.units import parse_bytes
from . import slow_store
from .cache_real import served
from .harness import Record, alternate, medians, spread

BATCH = 32
SAMPLES = 512
HIT, FILE = "hit", "file in the page cache"


def bench(config: BenchCacheConfig, record: Record) -> None:
    """Let hits and file reads take turns, an epoch each."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        home = Path(name)
        num_bytes = parse_bytes(config.sample_bytes, name="sample_bytes")
        files = slow_store.MadeUp(num_samples=SAMPLES, num_bytes=num_bytes)
        with served(home / "cache.sock", DEFAULT, SAMPLES, num_bytes):
            counts: Any = {"num_samples": SAMPLES, "batch_size": BATCH, "epochs": 1 << 20}
            hello = Hello(job="hits", run="1", data="made up", **counts)
            with contextlib.closing(Client(home / "cache.sock", hello, tell=_refuse)) as client:
                sides = {HIT: _hits(client, files, config), FILE: _reads(home, files, config)}
                taken = alternate(sides, 20 * config.repeats)
    taken = {name: runs[1:] for name, runs in taken.items()}  # the first also fills what the system keeps
    found = medians(taken)
    record.keep(hit={"batch": BATCH, "sample_bytes": num_bytes, "microseconds": found, "runs": taken})
    for side, microseconds in found.items():
        record.say(f"{side}: {microseconds:.1f} us a sample of {num_bytes} bytes ({spread(taken[side])})")


def _hits(client: Client, files: slow_store.MadeUp, config: BenchCacheConfig) -> Callable[[], float]:
    """An epoch of batches that are all there; the microseconds of a sample."""
    epoch = 0

    def pass_through() -> float:
        nonlocal epoch
        order, following = (_order(config.seed + number) for number in (epoch, epoch + 1))
        client.begin(epoch, order, following)
        epoch, found = epoch + 1, 0
        began = time.perf_counter()
        for at in range(0, SAMPLES, BATCH):
            hits = client.use(order[at : at + BATCH])
            if epoch == 1:
                batch = order[at : at + BATCH]
                client.store(batch, [files.read(index) for index in batch])
            found += sum(hit is not None for hit in hits)
        seconds = time.perf_counter() - began
        if found != SAMPLES * (epoch > 1):
            raise TransportError(f"the cache had {found} of {SAMPLES} samples that were stored in it")
        return seconds / SAMPLES * 1e6

    pass_through()
    return pass_through


def _reads(home: Path, files: slow_store.MadeUp, config: BenchCacheConfig) -> Callable[[], float]:
    paths = [home / f"{index:06}" for index in range(SAMPLES)]
    for index, path in enumerate(paths):
        path.write_bytes(files.read(index))
    passes = iter(range(1 << 30))

    def pass_through() -> float:
        order = _order(config.seed + next(passes))
        began = time.perf_counter()
        for at in range(0, SAMPLES, BATCH):
            batch = [paths[index].read_bytes() for index in order[at : at + BATCH]]
            assert len(batch) == BATCH
        return (time.perf_counter() - began) / SAMPLES * 1e6

    return pass_through


def _order(seed: int) -> list[int]:
    return random.Random(seed).sample(range(SAMPLES), SAMPLES)


def _refuse(sentence: str) -> None:
    raise TransportError(sentence)
