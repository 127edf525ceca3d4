"""Hits of MosaicML's StreamingDataset in a cache of a quarter of its data: its own eviction, and by next use.

pip install mosaicml-streaming
python scripts/examples/mosaicml_next_use.py
"""

import tempfile

import numpy
from streaming import MDSWriter, StreamingDataset  # pyright: ignore[reportMissingImports]

from penstock.pipeline.integrations.mosaicml import NextUseDataset

SHARDS, SAMPLES, EPOCHS, BYTES = 64, 40, 3, 1000


def hits(kind: type, remote: str) -> float:
    """Return the part of the shards of later epochs that were there: a full cache fetches as it evicts."""
    evicted = []

    class Counted(kind):
        def _evict_shard(self, shard_id: int) -> None:
            evicted.append(shard_id)
            super()._evict_shard(shard_id)

    quarter = SHARDS * SAMPLES * BYTES // 4 + 30_000  # and the index
    with tempfile.TemporaryDirectory() as local:
        order = {"shuffle": True, "shuffle_block_size": 4 * SAMPLES, "predownload": 20, "batch_size": 10}
        data = Counted(remote=remote, local=local, cache_limit=quarter, **order)
        for epoch in range(EPOCHS):
            assert sum(1 for _ in data) == SHARDS * SAMPLES
            evicted = [] if epoch == 0 else evicted
    return 1 - len(evicted) / (SHARDS * (EPOCHS - 1))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as remote:
        columns, limit = {"data": f"ndarray:int8:{BYTES}"}, SAMPLES * (BYTES + 20)
        with MDSWriter(out=remote, columns=columns, size_limit=limit) as writer:
            for _ in range(SHARDS * SAMPLES):
                writer.write({"data": numpy.zeros(BYTES, numpy.int8)})
        for kind in (StreamingDataset, NextUseDataset):
            print(f"{kind.__name__}: {hits(kind, remote):.2f}")
