"""The disk of a rank: frames leave the memory and come back with the same bits, in whatever order."""

import concurrent.futures
import math
import threading
import time

import pytest
import torch
from disks import MIB, SIZES, Short, Slow, frame_of, put_all

from penstock.compression.buffers import Pool, size_class
from penstock.compression.errors import ConfigError, PlanError
from penstock.stages.memory.disk import Disk, DiskOptions, SwapFile, aligned, disk_rate, timed


class Slower(Slow):
    """Slower than whatever else may run beside."""

    seconds = 0.5


def begun(disk):
    """Wait until a request has begun."""
    while not disk._file.order:
        time.sleep(0.001)


@pytest.mark.parametrize(("swap_file", "own_buffers"), [(SwapFile, False), (SwapFile, True), (Short, False)])
def test_frames_of_all_lengths_come_back_and_leave_the_memory(swap_file, own_buffers, opened):
    disk, store = opened(swap_file)
    pool = store.pool() if own_buffers else Pool()
    kept = put_all(store, pool=pool)
    disk.drain()
    assert own_buffers or not pool._lent  # all went back to whoever lent them
    assert disk.bytes_written == sum(map(aligned, SIZES))
    assert disk.num_bytes == sum(map(size_class, SIZES))
    for _ in range(2):
        for key, values in kept.items():
            store.fetch(key)
            assert store.get(key).bytes.equal(values)
    assert disk.bytes_read == 2 * disk.bytes_written
    assert store.num_bytes == sum(SIZES)
    for key in kept:
        store.drop(key)
    assert disk.num_bytes == store.num_bytes == 0


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
    memory = disk.tiers.device
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


def test_what_waits_to_be_written_is_memory_that_it_leaves_and_makes_others_wait(opened):
    disk, store = opened(Slower, depth=1, most_waiting=4 * MIB)
    put_all(store, [MIB] * 4)
    assert disk.tiers.device.now == disk.tiers.leaving.now > 2 * MIB
    assert store.tiers.disk.now == 4 * MIB
    assert disk.seconds_waited == 0
    store.put("one more", frame_of(MIB)[0])
    assert disk.seconds_waited > 0
    store.put("large", frame_of(6 * MIB)[0])  # alone it may be more
    store.drop("large")
    store.drop(3)
    disk.drain()
    assert disk.tiers.device.now == disk.tiers.leaving.now == 0
    assert (disk.tiers.device.peak, store.tiers.disk.now) == (6 * MIB, 4 * MIB)


def test_reads_go_before_writes(opened):
    disk, store = opened(Slow, depth=1)
    kept = put_all(store, [MIB])
    disk.drain()
    for key in range(1, 4):
        store.put(key, frame_of(MIB)[0])
    assert store.get(0).bytes.equal(kept[0])
    disk.drain()
    assert disk._file.order[:3] in (["write", "write", "read"], ["write", "read", "write"])


def test_what_is_dropped_while_somebody_waits_for_it_is_his(opened):
    disk, store = opened(Slow)
    kept = put_all(store, [MIB])
    disk.drain()
    with concurrent.futures.ThreadPoolExecutor() as others:
        coming = others.submit(lambda: store.get(0).bytes)
        while "read" not in disk._file.order:
            time.sleep(0.001)
        store.drop(0)
        assert coming.result().equal(kept[0])
    assert (disk.num_bytes, disk.tiers.device.now) == (0, 0)


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
    ("options", "kind", "found"),
    [
        ({"path": "/nowhere/at/all"}, ConfigError, "/nowhere/at/all"),
        ({"budget": "much"}, PlanError, "memory.disk=much"),
        ({"budget": 0}, PlanError, "memory.disk=0"),
    ],
)
def test_what_cannot_be_is_refused(options, kind, found):
    with pytest.raises(kind, match=found):
        Disk(DiskOptions(**options))


KIB = 1 << 10


@pytest.mark.parametrize("num_frames", [1, 4, 11])
def test_a_measurement_writes_and_reads_all_once_and_nothing_stays(num_frames, opened):
    disk, num_bytes = opened()[0], num_frames * 64 * KIB
    for times in (1, 2):
        rates = timed(disk, num_frames=num_frames, frame_bytes=64 * KIB)
        assert all(0 < rate < math.inf for rate in rates)
        assert (disk.bytes_written, disk.bytes_read) == (times * num_bytes, times * num_bytes)
        assert disk.num_bytes == disk.tiers.device.now == 0


def test_the_rates_are_those_of_the_disk_and_several_requests_are_under_way(opened):
    written, read = timed(opened(Slow)[0], num_frames=8, frame_bytes=64 * KIB)
    alone = 64 * KIB / Slow.seconds  # four at a time: twice Slow.seconds
    assert 2 * alone < written < 4.01 * alone
    assert 2 * alone < read < 4.01 * alone


def test_where_no_file_can_be_there_is_no_rate(tmp_path):
    assert disk_rate(DiskOptions(path=tmp_path / "nowhere")) is None
