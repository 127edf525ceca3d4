"""StreamingDataset of MosaicML that keeps the shards whose next use comes soonest.

    data = NextUseDataset(remote=..., local=..., cache_limit="20gb", batch_size=32, shuffle=True)

StreamingDataset drops the shard that was read longest ago. In a cache smaller than the data few shards are
still there when they are read again. The order of an epoch follows from its number, so the next uses are
known: here the shard goes whose next use is last, in this epoch or the next. Samples and their order stay
the same.

Source: Belady's choice (A study of replacement algorithms, IBM Systems Journal 5(2), 1966), per shard."""

from __future__ import annotations

from typing import Any

import numpy
from numpy.typing import NDArray
from streaming import StreamingDataset  # pyright: ignore[reportMissingImports]
from streaming.base.batching import generate_work  # pyright: ignore[reportMissingImports]
from streaming.base.dataset import _ShardState  # pyright: ignore[reportMissingImports]


class NextUseDataset(StreamingDataset):
    """A StreamingDataset with another eviction; its arguments, state and samples are the same.

    Every worker computes the order of two epochs for all workers of its machine, 8 bytes a sample each."""

    _uses: list[NDArray[Any]]  # of each shard the ascending places at which a worker of this machine reads it

    def _get_work(self, epoch: int, sample_in_epoch: int) -> NDArray[numpy.int64]:
        work = super()._get_work(epoch, sample_in_epoch)
        if self.cache_limit:
            self._uses = self._uses_in((epoch, sample_in_epoch), (epoch + 1, 0))
        return work

    def _uses_in(self, *epochs: tuple[int, int]) -> list[NDArray[Any]]:
        """Of each shard the places of its samples, counted on over these epochs as each worker goes."""
        world, begin = self._parallel_worker_world, 0
        shards, places = [], []
        for epoch, sample in epochs:
            here = generate_work(self.batching_method, self, world, epoch, sample)[world.node]
            of_workers = here.reshape(here.shape[0] * here.shape[1], -1)
            workers, place = numpy.nonzero(of_workers >= 0)  # -1 fills up batches
            samples = of_workers[workers, place]
            shards.append(numpy.searchsorted(self.spanner.shard_bounds, samples, side="right") - 1)
            places.append(begin + place)
            begin += of_workers.shape[1]
        shard, place = map(numpy.concatenate, (shards, places))
        ascending = numpy.lexsort((place, shard))
        bounds = numpy.searchsorted(shard[ascending], numpy.arange(1, self.num_shards))
        return numpy.split(place[ascending], bounds)

    def _evict_coldest_shard(self) -> None:
        """Drop the shard that is needed last; called with the cache locked."""
        held = numpy.flatnonzero(self._shard_states.numpy() == _ShardState.LOCAL)
        if not hasattr(self, "_iterator") or not len(held):  # read by index, or nothing to drop
            return super()._evict_coldest_shard()
        # the thread that prepares shards may lag behind what is read, and asks for all on its way
        now = min(self._iterator.prepare_index, self._iterator.yield_index)
        self._evict_shard(max(held.tolist(), key=lambda shard: self._next_use(shard, now)))

    def _next_use(self, shard: int, now: int) -> float:
        after = numpy.searchsorted(self._uses[shard], now)
        return float(self._uses[shard][after]) if after < len(self._uses[shard]) else numpy.inf
