"""The stores behind their table: opened by name with options, and what a budget admits."""

import pytest
import torch

from penstock.compression.pool import Frame
from penstock.stages.memory.offload import offload
from penstock.stages.memory.store import Store, StoreOptions, UnpooledBuffers
from penstock.stages.memory.stores import STORES, open_store


def frame_of(num_bytes):
    pool = UnpooledBuffers()
    return Frame(pool.take(num_bytes), num_bytes, pool)


@pytest.mark.parametrize("tier", STORES)
def test_a_frame_is_counted_from_its_admission_on_and_kept_until_it_is_dropped(tier):
    store, frame = open_store(tier, StoreOptions(budget=250)), frame_of(100)
    assert store.admit("a", 100)
    assert store.num_bytes == 100  # before it is there
    store.put("a", frame)
    assert store.num_bytes == 100
    store.fetch("a")
    assert store.get("a").bytes.equal(frame.bytes)
    store.put("b", frame_of(100))  # counts though nothing was set aside
    assert not store.admit("c", 51)
    assert store.admit("c", 50)
    store.drop("a")
    store.drop("a")
    assert store.num_bytes == 150
    assert store.admit("d", 100)


def test_a_tier_is_one_row_and_gets_its_options(monkeypatch, tmp_path):
    opened = []

    class Folder(Store):
        def __init__(self, options):
            super().__init__(options)
            opened.append(options)

    monkeypatch.setitem(STORES, "folder", Folder)
    options = StoreOptions(path=tmp_path, budget=1 << 20)
    assert isinstance(open_store("folder", options), Folder)
    with offload("folder", min_bytes=1, budget="1MiB") as saved:
        y = (torch.ones(1 << 10, requires_grad=True) * 2).exp().sum()
    assert opened == [options, StoreOptions(budget=1 << 20)]
    assert saved.num_packs == 1
    y.backward()
