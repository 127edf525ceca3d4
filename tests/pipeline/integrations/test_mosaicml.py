"""Shards of MosaicML's data sets, kept by their next use: the same samples, fetched less often."""

import os
import subprocess
import sys
from typing import Any

import pytest
from checkout import run

streaming: Any = pytest.importorskip(
    "streaming", reason="mosaicml-streaming wants other versions: ./scripts/integrations mosaicml"
)

from penstock.pipeline.integrations.mosaicml import NextUseDataset  # noqa: E402

SHARDS, SAMPLES = 32, 20


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    folder = tmp_path_factory.mktemp("remote")
    columns = {"id": "int", "data": "bytes"}
    with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=1040 * SAMPLES) as writer:
        for number in range(SHARDS * SAMPLES):
            writer.write({"id": number, "data": bytes(1000)})
    return str(folder)


@pytest.fixture
def opened(remote, tmp_path):
    """Return a data set with a cache of 10 of 32 shards that counts what it evicts."""

    def open_(kind: Any, **options: Any) -> Any:
        class Counted(kind):
            evicted = 0

            def _evict_shard(self, shard_id: int) -> None:
                self.evicted += 1
                super()._evict_shard(shard_id)

        order = {"shuffle": True, "shuffle_block_size": 2 * SAMPLES, "predownload": 10, "batch_size": 5}
        local = str(tmp_path / kind.__name__ / str(len(options)))
        return Counted(remote=remote, local=local, **(order | {"cache_limit": 10 * 1080 * SAMPLES} | options))

    return open_


def ids(data):
    return [int(one["id"]) for one in data]


@pytest.mark.parametrize("ahead", [10, 5])
def test_samples_and_their_order_are_the_same_and_fewer_shards_are_fetched(opened, ahead):
    theirs, ours = (opened(kind, predownload=ahead) for kind in (streaming.StreamingDataset, NextUseDataset))
    orders = [[ids(data) for _ in range(4)] for data in (theirs, ours)]
    assert orders[0] == orders[1]
    assert sorted(orders[0][0]) == [*range(SHARDS * SAMPLES)]
    assert ours.evicted < 0.9 * theirs.evicted


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_uses_of_a_shard_are_the_places_where_it_is_read_in_this_epoch_and_the_next(opened, shuffle):
    data = opened(NextUseDataset, shuffle=shuffle)
    first, uses, second = ids(data), data._uses, ids(data)
    read = [(data.spanner[one][0], place) for place, one in enumerate(first + second)]
    assert [divmod(int(use), 2 * SHARDS * SAMPLES) for use in uses] == sorted(read)


def test_workers_and_a_run_that_resumes_read_the_same(opened):
    def batches(kind, workers, state=None):
        loader = streaming.StreamingDataLoader(opened(kind), batch_size=5, num_workers=workers)
        if state is not None:
            loader.load_state_dict(state)
        reads = iter(loader)
        head = [next(reads)["id"].tolist() for _ in range(20)]
        kept = loader.state_dict()
        return head, [one["id"].tolist() for one in reads], kept

    head, tail, kept = batches(NextUseDataset, 2)
    assert (head, tail) == batches(streaming.StreamingDataset, 2)[:2]
    assert sum(map(len, head + tail)) == SHARDS * SAMPLES
    assert batches(NextUseDataset, 2, kept)[0] == tail[:20]


def test_without_a_limit_or_an_epoch_it_evicts_as_theirs_does(opened):
    unlimited = opened(NextUseDataset, cache_limit=None)
    ids(unlimited)
    unlimited.evict_coldest_shard()
    assert unlimited.evicted == 1
    data = opened(NextUseDataset)
    assert [int(data[i]["id"]) for i in range(0, SHARDS * SAMPLES, 7)] == [*range(0, SHARDS * SAMPLES, 7)]
    assert data.evicted


RANK = """
import os, sys, time, torch.distributed as dist, streaming
from penstock.pipeline.integrations.mosaicml import NextUseDataset

kind, remote, local, seconds = sys.argv[1:]
dist.init_process_group("gloo")
evicted = []

class Counted(getattr(streaming, kind, NextUseDataset)):
    def _evict_shard(self, shard_id):
        evicted.append(shard_id)
        super()._evict_shard(shard_id)

order = {"shuffle": True, "shuffle_block_size": 80, "predownload": 8, "batch_size": 4}
data = Counted(remote=remote, local=local, cache_limit=12 * 1080 * 20, num_canonical_nodes=1, **order)
for one in (one for epoch in range(2) for one in data):
    time.sleep(float(seconds))
print(len(evicted), flush=True)
dist.barrier()
os._exit(0)
"""


def test_ranks_of_a_machine_that_are_not_in_step_do_not_drop_what_the_other_reads(remote, tmp_path):
    def evicted(kind, port):
        started = []
        for rank, seconds in enumerate(("0.006", "0.002")):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            command = [sys.executable, "-c", RANK, kind, remote, str(tmp_path / kind), seconds]
            env = os.environ | {key: str(value) for key, value in own.items()}
            started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        return sum(int(process.communicate(timeout=100)[0]) for process in started)

    theirs, ours = evicted("StreamingDataset", 29731), evicted("NextUseDataset", 29732)
    assert ours < 0.9 * theirs


def test_the_example_shows_more_hits():
    shown = run("scripts/examples/mosaicml_next_use.py")
    theirs, ours = (float(line.split(": ")[1]) for line in shown.splitlines())
    assert ours > theirs + 0.1, shown
