"""The stores by their table, opened by name with options, and the bytes that they count, in many threads."""

import gc
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from penstock.compression.buffers import Frame, new_bytes
from penstock.stages.memory.byte_budget import ByteCounter, Tiers
from penstock.stages.memory.stores import STORES, FallbackStore, StoreOptions, UnpooledBuffers, open_store


def frame_of(num_bytes, value=0):
    return Frame(new_bytes(num_bytes).fill_(value), num_bytes, UnpooledBuffers())


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


@pytest.fixture
def disk(opened):
    return opened()[0]


@pytest.mark.parametrize("limits", [{"host": 250}, {"device": 250}])
def test_a_full_tier_is_followed_by_the_disk_and_has_room_again(limits, disk):
    tiers = Tiers(**limits)
    store = open_store("host", StoreOptions(disk=disk, tiers=tiers))
    assert isinstance(store, FallbackStore)
    for key in range(4):
        assert store.admit(key, 100)
        store.put(key, frame_of(100, key))
    disk.drain()
    assert (tiers.host.now, tiers.disk.now, store.num_bytes) == (200, 200, 400)
    store.fetch(3)
    for key in range(4):
        assert store.get(key).bytes.eq(key).all()
    store.drop(0)
    store.drop(3)
    store.drop(3)
    assert (tiers.host.now, tiers.disk.now) == (100, 100)
    assert store.admit(5, 100)
    assert (tiers.host.now, tiers.disk.now) == (200, 100)


def test_what_did_not_shrink_goes_only_where_it_is_away(disk):
    store = open_store("packed", StoreOptions(disk=disk, tiers=(tiers := Tiers(device=10_000))))
    assert store.admit(0, 100)
    assert store.admit(1, 100, dense=torch.device("cpu"))
    for key in range(2):
        store.put(key, frame_of(100, key))
    assert (tiers.packed.now, tiers.disk.now) == (100, 100)


def test_without_a_limit_or_a_disk_a_tier_is_alone(disk):
    for options in (StoreOptions(disk=disk, tiers=Tiers()), StoreOptions(tiers=Tiers(host=250))):
        assert not isinstance(open_store("host", options), FallbackStore)
    assert not isinstance(open_store("disk", StoreOptions(disk=disk, tiers=Tiers(device=9))), FallbackStore)


def test_threads_and_a_collector_in_their_midst_lose_no_byte():
    counter, threads = ByteCounter(), 4

    class Counted:
        def __init__(self):
            self.itself = self  # only the collector frees it
            counter.add(7)

        def __del__(self):
            counter.add(-7)

    def work(_):
        for _ in range(2000):
            Counted()
            counter.add(3)
            counter.add(-2)

    before, _ = gc.get_threshold(), gc.set_threshold(5)
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert counter.now == threads * 2000


class Paused(deque):
    """Of whose takers the first is held in the middle."""

    def __init__(self):
        super().__init__()
        self.taken, self.gate = threading.Event(), threading.Event()

    def popleft(self):
        found, first = super().popleft(), not self.taken.is_set()
        self.taken.set()
        if first:
            assert self.gate.wait(10)
        return found


@pytest.mark.parametrize("folds", ["itself", "another thread"])
def test_who_waits_hears_of_every_byte_less_whoever_folds_it(folds):
    counter, heard = ByteCounter(), []
    counter.add(3)
    changes = Paused()
    if folds == "another thread":
        counter._changes = changes
    waits = threading.Thread(
        target=lambda: heard.append(counter.wait(lambda: counter._now == 0)), daemon=True
    )
    waits.start()
    adds = threading.Thread(target=counter.add, args=(-1,))
    adds.start()
    assert folds == "itself" or changes.taken.wait(10)
    counter.add(-2)  # perhaps while the other is in the middle of it, which then takes it along
    assert waits.is_alive() or folds == "itself"
    changes.gate.set()
    adds.join(10)
    waits.join(10)
    assert heard == [None]


@pytest.mark.parametrize("on_gpu", [False, True])
def test_frames_in_host_memory_are_a_cpus_own(on_gpu):
    tiers = Tiers(device=1000, host=80, on_gpu=on_gpu)
    tiers.fix(100)
    tiers.counters["packed"].add(10)
    tiers.counters["host"].add(20)
    tiers.counters["disk"].add(40)
    assert tiers.device.now == 110 + 20 * (not on_gpu)
    assert tiers.peaks == {"device": tiers.device.now, "packed": 10, "host": 20, "disk": 40}
    assert tiers.host.fits(60)
    assert not tiers.host.fits(61)
