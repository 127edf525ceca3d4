"""The disk of a rank: frames leave the memory and come back with the same bits, in whatever order."""

import threading
import time

import pytest
import torch
from disks import MIB, SIZES, Slow, frame_of, put_all

from penstock.compression.errors import ConfigError, PlanError
from penstock.compression.pool import Pool
from penstock.stages.memory.disk import Disk
from penstock.stages.memory.extents import aligned
from penstock.stages.memory.room import DiskOptions


class Slower(Slow):
    """Slower than whatever else may run beside."""

    seconds = 0.8


def begun(disk):
    """Wait until a request has begun."""
    while not disk._slab.order:
        time.sleep(0.001)


def test_frames_of_all_lengths_come_back_and_leave_the_memory(opened):
    disk, store = opened()
    pool = Pool()
    kept = put_all(store, pool=pool)
    disk.drain()
    assert not pool._lent  # all went back to whoever lent them
    assert disk.bytes_written == disk.num_bytes == sum(map(aligned, SIZES))
    for _ in range(2):
        for key, values in kept.items():
            store.fetch(key)
            assert store.get(key).bytes.equal(values)
    assert disk.bytes_read == 2 * disk.bytes_written
    assert store.num_bytes == sum(SIZES)
    for key in kept:
        store.drop(key)
    assert disk.num_bytes == store.num_bytes == 0


def test_buffers_of_the_disk_and_of_others_are_written_alike(opened):
    disk, store = opened()
    kept = put_all(store, pool=store.pool())
    disk.drain()
    assert all(store.get(key).bytes.equal(values) for key, values in kept.items())


def test_a_frame_that_is_wanted_before_it_is_written_is_the_one_in_memory(opened):
    disk, store = opened(Slow, depth=1)
    frames = [frame_of(MIB, seed) for seed in range(3)]
    for key, (frame, _) in enumerate(frames):
        store.put(key, frame)
    begun(disk)
    for key, (frame, values) in enumerate(frames):
        assert store.get(key) is frame
        assert frame.bytes.equal(values)
    disk.drain()
    assert disk.bytes_written == MIB  # the other two need not leave any more
    assert all(frame._holders and frame.bytes.equal(values) for frame, values in frames)
    assert store.get(0) is frames[0][0]


def test_what_is_dropped_before_it_is_written_is_not(opened):
    disk, store = opened(Slower, depth=1)
    put_all(store, [MIB] * 4)
    begun(disk)
    for key in range(4):
        store.drop(key)
    assert disk.num_bytes == MIB  # nobody else may have the place that is being written
    disk.drain()
    assert disk.bytes_written == MIB
    assert disk.num_bytes == 0


def test_what_is_fetched_is_read_once_and_counted_while_it_waits(opened):
    disk, store = opened()
    kept = put_all(store, [10_000] * 8)
    disk.drain()
    memory = disk.memory.device
    assert memory.now == 0
    for key in (7, 6, 5):
        store.fetch(key)
    disk.drain()
    assert (disk.bytes_read, memory.now) == (3 * aligned(10_000), 3 * 10_000)
    for key in (7, 6):
        assert store.get(key).bytes.equal(kept[key])
    store.drop(5)
    assert (disk.num_bytes, memory.now) == (7 * aligned(10_000), 0)
    assert disk.bytes_read == 3 * aligned(10_000)


def test_what_waits_to_be_written_counts_as_memory_that_it_leaves(opened):
    disk, store = opened(Slower, depth=1)
    put_all(store, [MIB] * 4)
    assert disk.memory.device.now == disk.memory.leaving.now > 2 * MIB
    assert store.tiers.disk.now == 4 * MIB
    store.drop(3)
    disk.drain()
    assert disk.memory.device.now == disk.memory.leaving.now == 0
    assert (disk.memory.device.peak, store.tiers.disk.now) == (4 * MIB, 3 * MIB)


def test_who_writes_faster_than_the_disk_waits_and_that_is_counted(opened):
    disk, store = opened(Slower, depth=2, most_waiting=4 * MIB)
    put_all(store, [MIB] * 6)
    assert disk.seconds_waited > 0
    assert disk.most_waited_bytes == 4 * MIB
    store.put("large", frame_of(6 * MIB)[0])  # alone it may be more
    disk.drain()


def test_reads_go_before_writes(opened):
    disk, store = opened(Slow, depth=1)
    kept = put_all(store, [MIB])
    disk.drain()
    for key in range(1, 4):
        store.put(key, frame_of(MIB)[0])
    assert store.get(0).bytes.equal(kept[0])
    disk.drain()
    assert disk._slab.order[:3] in (["write", "write", "read"], ["write", "read", "write"])


def test_many_threads_put_get_and_drop_at_a_time(opened):
    disk, store = opened(most_waiting=2 * MIB)
    wrong = []

    def work(thread):
        generator, previous = torch.Generator().manual_seed(thread), []
        for turn in range(30):
            num_bytes = int(torch.randint(1, 300_000, (), generator=generator))
            frame, values = frame_of(num_bytes, thread * 100 + turn)
            store.put((thread, turn), frame)
            previous.append(values)
            if turn >= 3:
                store.fetch((thread, turn - 3))
                if not store.get((thread, turn - 3)).bytes.equal(previous.pop(0)):
                    wrong.append((thread, turn))
                store.drop((thread, turn - 3))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    disk.drain()
    assert wrong == []
    assert store.num_bytes <= 12 * 300_000


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        ({"path": "/nowhere/at/all"}, ConfigError, r"found /nowhere/at/all \(Not a directory\)"),
        ({"budget": "much"}, PlanError, "memory.disk=much is not a size in bytes"),
        ({"budget": 0}, PlanError, "memory.disk=0 is not a size in bytes"),
        ({"per_day": "much"}, PlanError, "memory.disk_per_day=much is not a size in bytes"),
    ],
)
def test_what_cannot_be_is_refused(options, kind, sentence):
    with pytest.raises(kind, match=sentence):
        Disk(DiskOptions(**options))


def test_it_says_what_it_did(opened, tmp_path):
    disk, store = opened()
    put_all(store, [MIB])
    disk.drain()
    past = "past" if disk.direct else "through"
    assert (
        str(disk)
        == f"disk: {tmp_path}, {past} the page cache, 1 MiB written, 0 B read, 0.00 s waited for room"
    )
