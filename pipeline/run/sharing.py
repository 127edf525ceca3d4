"""The sample cache of a run, by its options: which samples go through it, under which names."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...conf.schema import TrainConfig
from ..data.batches import Table
from ..data.cached import CachedDataset, CacheReader, cache_reader, sample_source
from ..data.image_folder import Files
from ..data.loader import in_memory
from ..data.samples import IterableTable, MapTable, Samples
from ..pipeline import Pipeline


def check(config: TrainConfig, samples: Samples) -> None:
    """Refuse now samples that cannot be cached, where that is asked for.

    Raises: ConfigError: they have no numbers, or do not tell how they are read."""
    if config.cache.mode != "none" and not in_memory(samples.train):
        sample_source(_dataset(samples.train), decoded=config.cache.decoded)


def share(
    config: TrainConfig, samples: Samples, pipe: Pipeline, *, folder: Path, tell: Callable[[str], None]
) -> tuple[Table, CacheReader | None]:
    """Return the samples to train on as this rank reads them, and what brings them through the cache, if
    that was asked for; collective.

    Raises: ConfigError: they cannot be cached."""
    options, table = config.cache, samples.train
    if options.mode == "none":
        return table, None
    run = pipe.world.all_gather_json(uuid.uuid4().hex, at="the name of its run")[0]
    if in_memory(table):
        tell(f"cache={options.mode}: these samples lie in memory, so none of them goes through the cache")
        return table, None
    dataset = _dataset(table)
    through = cache_reader(
        sample_source(dataset, decoded=options.decoded),
        job=options.job or folder.name,
        run=run,
        data=options.data,
        socket=options.socket,
        backend=options.backend,
        num_samples=samples.num_samples("train"),
        batch_size=config.batch_size,
        epochs=config.epochs,
    )
    if isinstance(table, Files):
        return dataclasses.replace(table, through=through.payloads), through
    asks = CachedDataset(dataset, through)
    return (dataclasses.replace(table, dataset=asks) if isinstance(table, MapTable) else asks), through


def _dataset(table: Table) -> Any:
    return table.dataset if isinstance(table, MapTable | IterableTable) else table
