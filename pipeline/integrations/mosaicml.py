"""StreamingDataset of MosaicML that keeps the shards whose next use comes soonest.

    data = NextUseDataset(remote=..., local=..., cache_limit="20gb", batch_size=32, shuffle=True)

StreamingDataset drops the shard that was read longest ago. In a cache smaller than the data few shards are
still there when they are read again. The order of an epoch follows from its number, so the next uses are
known: here the shard goes whose next use is last, in this epoch or the next. Samples and their order stay the
same.

Source: Belady's choice (A study of replacement algorithms, IBM Systems Journal 5(2), 1966), per shard."""

from typing import Any

import numpy
from numpy.typing import NDArray
from streaming import StreamingDataset  # pyright: ignore[reportMissingImports]
from streaming.base.batching import generate_work  # pyright: ignore[reportMissingImports]
from streaming.base.dataset import _ShardState  # pyright: ignore[reportMissingImports]
from streaming.base.shared import SharedArray, _get_path  # pyright: ignore[reportMissingImports]


class NextUseDataset(StreamingDataset):
    """A StreamingDataset with another eviction; its arguments, state and samples are the same.

    ``cache_limit`` must hold the shards that all workers of a machine download ahead (``predownload``). Every
    worker computes the order of two epochs for all machines: up to 64 bytes a sample of both meanwhile, and 8
    of those of this machine from then on."""

    _uses: NDArray[Any] | None = None  # (worker, shard, place) of each read as one number, ascending

    def _get_work(self, epoch: int, sample_in_epoch: int) -> NDArray[numpy.int64]:
        work = super()._get_work(epoch, sample_in_epoch)
        if self.cache_limit:
            parallel = self._parallel_worker_world
            self._uses = self._uses_in((epoch, sample_in_epoch), (epoch + 1, 0))
            self._worker = parallel.rank_of_node * parallel.workers_per_rank + parallel.worker_of_rank
            workers = parallel.ranks_per_node * parallel.workers_per_rank
            name = _get_path(self._shm_prefix_int, f"places_of_{workers}")
            self._places = SharedArray(workers, numpy.int64, name)  # from 1; 0: none is known
            self._places[self._worker] = 1
        return work

    def _uses_in(self, *epochs: tuple[int, int]) -> NDArray[Any]:
        """Return all reads over these epochs; each worker of the machine counts its places on."""
        world, begin, rows = self._parallel_worker_world, 0, []
        for epoch, sample in epochs:
            here = generate_work(self.batching_method, self, world, epoch, sample)[world.node]
            of_workers = here.reshape(here.shape[0] * here.shape[1], -1)
            worker, place = numpy.nonzero(of_workers >= 0)  # -1 fills up batches
            shard = self.spanner.shard_bounds.searchsorted(of_workers[worker, place], side="right") - 1
            rows.append((worker * self.num_shards + shard, begin + place))
            begin += of_workers.shape[1]
        self._end = begin
        return numpy.sort(numpy.concatenate([reader * begin + place for reader, place in rows]))

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Do as theirs, and tell the other workers of the machine how far this one is."""
        if self._uses is not None and hasattr(self, "_iterator"):
            # The preparing thread may lag behind the reader, and asks for every shard on its way.
            self._places[self._worker] = 1 + min(self._iterator.prepare_index, self._iterator.yield_index)
        super().prepare_shard(shard_id, blocking)

    def _evict_coldest_shard(self) -> None:
        """Drop the shard that is needed last; called with the cache locked."""
        held = numpy.flatnonzero(self._shard_states.numpy() == _ShardState.LOCAL)
        if self._uses is None or not hasattr(self, "_iterator") or not len(held):  # read by index
            return super()._evict_coldest_shard()
        places = self._places.numpy() - 1
        places[places < 0] = places[self._worker]
        readers = numpy.arange(len(places))[:, None] * self.num_shards + held
        now = readers * self._end + places[:, None]
        later = numpy.append(self._uses, -1)[self._uses.searchsorted(now)]
        waits = numpy.where(
            later // self._end == readers, later - now, self._end
        )  # _end: it is not read again
        self._evict_shard(int(held[waits.min(axis=0).argmax()]))
