"""The part ``loaders`` of ``penstock bench cache``: samples a second of resnet18 on a folder of JPEGs, by the
number of processes that load, beside the bound: the same steps on batches that are in memory already."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ...conf.bench_cache import BenchCacheConfig
from ...pipeline.samples import image_folder
from ...pipeline.samples.loader import Loader
from ...pipeline.samples.reading import Place, Reading
from .harness import Record, alternate, compared, spread

BOUND = "in memory"
WORKERS = (0, 1, 2)
SIDES = range(128, 225, 16)
"""Pixels at a side of the files, whose noise is hard to pack: some 100 kB each."""

SIZE = 64
BATCH, BATCHES = 16, 10
_QUALITIES = {128: 100, 144: 100, 160: 99, 176: 98, 192: 97, 208: 95, 224: 93}


def bench(config: BenchCacheConfig, record: Record) -> None:
    """Let all sides take turns: an epoch each, loading from its beginning on."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        sizes = write(Path(name), BATCH * BATCHES, seed=config.seed)
        table = image_folder.load(root=name, size=SIZE).train
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            step = _step(config.seed)
            sides: dict[str, Callable[[], float]] = {BOUND: _kept(table, step, config.seed)}
            sides |= {
                f"workers={workers}": partial(_loaded, table, step, config.seed, workers)
                for workers in WORKERS
            }
            alternate(sides, 1)
            taken = alternate(sides, config.repeats)
        finally:
            torch.set_num_threads(threads)
    rows: list[dict[str, Any]] = [
        {"side": side} | compared(runs, taken[BOUND], BATCH) for side, runs in taken.items()
    ]
    facts = {"file_bytes": statistics.mean(sizes), "size": SIZE, "batch_size": BATCH, "batches": BATCHES}
    record.keep(loaders=facts | {"rows": rows})
    for row in rows:
        record.say(
            f"{row['side']}: {row['samples_per_second']:.1f} samples/s, {row['speedup']:.2f}x "
            f"({spread(row['speedup_of_pairs'])}) what computing alone gives"
        )


def write(root: Path, number: int, *, seed: int) -> list[int]:
    """Write noise as JPEGs of unlike sizes, two classes of it; return the bytes of each file."""
    from PIL import Image

    drawn, sizes = np.random.default_rng(seed), []
    for split, count in (("train", number), ("val", 2)):
        for index in range(count):
            side = SIDES[index % len(SIDES)]
            folder = root / split / f"class{index % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            pixels = drawn.integers(0, 256, (side, side, 3), np.uint8)
            file = folder / f"{index:05}.jpg"
            Image.fromarray(pixels).save(file, quality=_QUALITIES[side], subsampling=0)
            if split == "train":
                sizes.append(file.stat().st_size)
    return sizes


def _step(seed: int) -> Callable[[Any, Any], None]:
    """A training step of resnet18."""
    from torchvision.models import resnet18

    torch.manual_seed(seed)
    model = resnet18(num_classes=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(inputs: Any, targets: Any) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def _kept(table: Any, step: Callable[[Any, Any], None], seed: int) -> Callable[[], float]:
    reading = Reading(tables={"train": table}, batch_size=BATCH, seed=seed)
    batches = [read.batch for place in _places() if (read := reading[place]).batch is not None]
    return lambda: _timed(step, batches)


def _loaded(table: Any, step: Callable[[Any, Any], None], seed: int, workers: int) -> float:
    reading = Reading(tables={"train": table}, batch_size=BATCH, seed=seed)
    loader = Loader(reading, _places(), workers=workers)
    try:
        return _timed(step, map(loader.take, _places()))
    finally:
        loader.close()


def _timed(step: Callable[[Any, Any], None], batches: Iterable[tuple[Any, Any]]) -> float:
    """Seconds of a step, from the moment on at which the first batch is asked for."""
    began = time.perf_counter()
    for inputs, targets in batches:
        step(inputs, targets)
    return (time.perf_counter() - began) / BATCHES


def _places() -> Sequence[Place]:
    return [Place("train", 0, number) for number in range(BATCHES)]
