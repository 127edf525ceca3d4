"""The disk of a rank: frames leave the memory and come back with the same bits, in whatever order. It may be
slow, full, worn or wrong: none hangs, none corrupts, each is named. Its file has no name."""

import concurrent.futures
import errno
import fcntl
import gc
import math
import mmap
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import MIB, SIZES, Fails, Short, Slow, frame_of, lent_bytes, put_all, refusing
from hypothesis import given
from hypothesis import strategies as st

from penstock.compression.buffers import Frame, Pool, size_class
from penstock.compression.errors import ConfigError, StageError
from penstock.stages.memory.disk import (
    UNIT,
    DiskOptions,
    PageBuffers,
    SwapFile,
    SwapSpace,
    aligned,
    disk_rate,
    timed,
)


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
    assert lent_bytes(disk) == sum(map(size_class, SIZES))
    for _ in range(2):
        for key, values in kept.items():
            store.fetch(key)
            assert store.get(key).bytes.equal(values)
    assert disk.bytes_read == 2 * disk.bytes_written
    assert store.num_bytes == sum(SIZES)
    for key in kept:
        store.drop(key)
    assert lent_bytes(disk) == store.num_bytes == 0


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
    assert lent_bytes(disk) == MIB  # nobody else may have the place that is being written
    disk.drain()
    assert disk.bytes_written == MIB
    assert lent_bytes(disk) == 0


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
    assert (lent_bytes(disk), memory.now) == (7 * aligned(10_000), 0)
    assert disk.bytes_read == 3 * aligned(10_000)


def test_what_waits_to_be_written_is_memory_that_it_leaves_and_makes_others_wait(opened):
    disk, store = opened(Slower, depth=1, most_waiting=4 * MIB)
    put_all(store, [MIB] * 4)
    assert disk.tiers.device.now == disk.tiers.leaving.now > 2 * MIB
    assert store.tiers.disk.now == 4 * MIB
    store.put("one more", frame_of(MIB)[0])
    assert disk.tiers.leaving.now <= 4 * MIB
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
    assert (lent_bytes(disk), disk.tiers.device.now) == (0, 0)


def test_many_threads_put_get_and_drop_at_a_time(opened):
    disk, store = opened(most_waiting=2 * MIB)

    def work(thread):
        generator, previous = torch.Generator().manual_seed(thread), []
        for turn in range(30):
            num_bytes = int(torch.randint(1, 300_000, (), generator=generator))
            frame, values = frame_of(num_bytes, thread * 100 + turn)
            store.put((thread, turn), frame)
            previous.append(values)
            if turn >= 3:
                store.fetch((thread, turn - 3))
                assert store.get((thread, turn - 3)).bytes.equal(previous.pop(0))
                store.drop((thread, turn - 3))

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    disk.drain()
    assert store.num_bytes <= 12 * 300_000


KIB = 1 << 10


@pytest.mark.parametrize("num_frames", [1, 4, 11])
def test_a_measurement_writes_and_reads_all_once_and_nothing_stays(num_frames, opened):
    disk, num_bytes = opened()[0], num_frames * 64 * KIB
    for times in (1, 2):
        rates = timed(disk, num_frames=num_frames, frame_bytes=64 * KIB)
        assert all(0 < rate < math.inf for rate in rates)
        assert (disk.bytes_written, disk.bytes_read) == (times * num_bytes, times * num_bytes)
        assert lent_bytes(disk) == disk.tiers.device.now == 0


def test_the_rates_are_those_of_the_disk_and_several_requests_are_under_way(opened):
    written, read = timed(opened(Slow)[0], num_frames=8, frame_bytes=64 * KIB)
    alone = 64 * KIB / Slow.seconds  # four at a time: twice Slow.seconds
    assert 2 * alone < written < 4.01 * alone
    assert 2 * alone < read < 4.01 * alone


def test_one_large_frame_keeps_several_requests_busy_in_spite_of_200_ms(opened):
    disk, store = opened(Slow)
    frame, values = frame_of(8 * MIB)
    began = time.perf_counter()
    store.put("a", frame)
    disk.drain()
    assert store.get("a").bytes.equal(values)
    assert disk._file.most == 4
    assert time.perf_counter() - began < 16 * Slow.seconds / 2


@pytest.mark.parametrize("what", ["read", "write"])
def test_a_disk_that_moves_nothing_is_an_error_and_not_for_ever(opened, what, monkeypatch):
    disk, store = opened()
    put_all(store, [100])
    disk.drain()
    monkeypatch.setattr(disk._file, what, lambda data, at: 0)
    if what == "write":
        store.put("b", frame_of(100)[0])
        disk._threads.drain()
    with pytest.raises(StageError, match="found it moved 0 of 4096 bytes and no more; look at that disk"):
        store.get(0 if what == "read" else "b")


@pytest.mark.parametrize("at", [0, 4097, MIB, 2 * MIB + 5, 3_000_000])
def test_a_bit_that_flips_on_disk_is_found_and_its_frame_named(opened, at):
    disk, store = opened()
    kept = put_all(store, [UNIT, 3_000_001, UNIT])
    disk.drain()
    start = UNIT + at
    with open(f"/proc/self/fd/{disk._file._file}", "r+b", buffering=0) as file:
        was = os.pread(file.fileno(), 1, start)
        os.pwrite(file.fileno(), bytes([was[0] ^ 16]), start)
    for _ in range(2):
        with pytest.raises(
            StageError, match=f"frame of 3000001 bytes at 4096 .* at {UNIT + at // MIB * MIB}, written"
        ):
            store.get(1)
    for key in (0, 2):
        assert store.get(key).bytes.equal(kept[key])


FAILURES = [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("dies"), SystemExit("dies")]


@pytest.mark.parametrize("error", FAILURES, ids=repr)
def test_a_write_that_fails_is_told_to_whoever_comes_next_and_hangs_nobody(opened, error):
    disk, store = opened(Fails)
    kept = put_all(store, [100, 5 * MIB])
    disk.drain()
    disk._file.writing = error
    store.put("lost", frame_of(3 * MIB)[0])
    kind, found = (StageError, "No space left .* free space") if error.args[1:] else (type(error), "dies")
    with pytest.raises(kind, match=found):
        disk.drain()
    with pytest.raises(kind, match=found):
        store.get("lost")
    store.put("next", frame_of(MIB)[0])
    disk._threads.drain()
    with pytest.raises(kind, match=found):
        store.put("after", frame_of(MIB)[0])
    disk._file.writing = None
    store.put("again", frame_of(MIB, 9)[0])  # told once
    for key in ("lost", "next"):
        store.drop(key)
    disk.drain()
    assert store.get("again").bytes.equal(frame_of(MIB, 9)[1])
    assert all(store.get(key).bytes.equal(values) for key, values in kept.items())
    assert lent_bytes(disk) == sum(map(size_class, (100, 5 * MIB, MIB)))


def test_a_read_that_fails_is_told_to_whoever_waits_and_to_nobody_else(opened):
    disk, store = opened(Fails)
    kept = put_all(store, [5 * MIB, 100])
    disk.drain()
    disk._file.reading = OSError(errno.EIO, "Input/output error")
    for _ in range(2):
        with pytest.raises(StageError, match=r"5242880 bytes could not be read .* Input/output error"):
            store.get(0)
    store.fetch(1)
    disk.drain()
    disk._file.reading = None
    store.drop(1)
    assert store.get(0).bytes.equal(kept[0])


def test_a_budget_bounds_the_file_and_the_rest_stays_in_memory(opened):
    disk, store = opened(budget=5 * UNIT + 100)
    assert store.offloads_from(torch.device("cpu"))
    frames = [frame_of(2 * UNIT, seed) for seed in range(4)]
    for frame, _ in frames[:2]:
        store.put(frame, frame)
    with pytest.warns(UserWarning, match="no room for 8 KiB .* memory.disk=20.1 KiB"):
        store.put(frames[2][0], frames[2][0])
    store.put(frames[3][0], frames[3][0])  # told once
    disk.drain()
    assert not store.offloads_from(torch.device("cpu"))
    assert disk.space.size <= 5 * UNIT + 100
    assert store.get(frames[3][0]) is frames[3][0]
    assert all(store.get(frame).bytes.equal(values) for frame, values in frames)
    store.drop(frames[0][0])
    assert store.offloads_from(torch.device("cpu"))
    for frame, _ in frames:
        store.drop(frame)
    assert lent_bytes(disk) == 0


def test_what_a_full_disk_has_no_space_for_stays_in_memory(opened, small_disk):
    disk, store = opened(path=small_disk)
    with pytest.warns(UserWarning, match=rf"no room for 96 KiB more in {small_disk}, where .* are free"):
        kept = put_all(store, [96 << 10] * 4)
    disk.drain()
    assert 96 << 10 <= disk.bytes_written <= 256 << 10
    assert all(store.get(key).bytes.equal(values) for key, values in kept.items())


def test_a_graph_that_the_garbage_collector_frees_in_the_middle_of_anything_hangs_nothing(opened):
    disk, store = opened()

    class Cycle:
        def __init__(self, key):
            self.me, self.key = self, key

        def __del__(self):
            store.drop(self.key)

    kept = put_all(store, [MIB] * 3)
    for key in (0, 1):
        Cycle(key)
    with disk._changed:
        gc.collect()  # the lock is held by this thread
    assert store.get(2).bytes.equal(kept[2])
    disk.drain()
    assert lent_bytes(disk) in (0, MIB)
    store.drop(2)
    assert lent_bytes(disk) == 0


def test_a_thread_that_finds_no_memory_is_told_to_whoever_comes_next(opened, monkeypatch):
    disk, _ = opened()
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refusing(errno.ENOMEM))
        frame = Frame(torch.zeros(MIB, dtype=torch.uint8)[1:], MIB - 1, Pool())
        disk.write(frame)  # it begins at no page, so it moves through another buffer
        with pytest.raises(StageError, match=r"1048575 bytes could not be written .* Cannot allocate memory"):
            disk.drain()
    disk.write(frame_of(MIB)[0])
    disk.drain()


def pages(content):
    own = mmap.mmap(-1, UNIT)
    own[:] = content * (UNIT // len(content))
    return memoryview(own)


LACKS = {"nothing": None, "posix_fallocate": (os, errno.EOPNOTSUPP), "fcntl": (fcntl, errno.EINVAL)}


@pytest.mark.parametrize("lacks", LACKS)
def test_nothing_is_seen_in_the_folder_and_bytes_come_back_whatever_a_file_system_lacks(
    lacks, tmp_path, monkeypatch
):
    if lacking := LACKS[lacks]:
        monkeypatch.setattr(lacking[0], lacks, refusing(lacking[1]))
    file = SwapFile(tmp_path)
    assert file.grow(0, 2 * UNIT)
    assert list(tmp_path.iterdir()) == []
    assert lacks != "fcntl" or not file.direct
    for content, found, at in [
        (pages(b"penstock"), pages(b"-"), UNIT),
        *[(memoryview(b"short"), memoryview(bytearray(5)), 3)] * (not file.direct),  # no page, no unit
    ]:
        file.move_all(file.write, content, at)
        file.move_all(file.read, found, at)
        assert found == content
    file.close()


def test_a_folder_that_takes_no_file_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    for folder, found in ((tmp_path / "nowhere", "nowhere"), (tmp_path / "file", "file")):
        with pytest.raises(ConfigError, match=f"found .*/{found} .Not a directory.*memory.path="):
            SwapFile(folder)
        assert disk_rate(DiskOptions(path=folder)) is None


class Endless(SwapFile):
    """As long as it is asked to be."""

    def __init__(self):
        self.folder = Path("/nowhere")

    def grow(self, size, more):
        return True


def space_of(*pieces, budget=None) -> Any:
    space = SwapSpace(Endless(), budget)
    return space, [space.take(piece * UNIT) for piece in pieces]


def test_the_smallest_free_slot_that_is_not_much_too_long_is_taken():
    space, (first, _, third, _) = space_of(4, 1, 2, 1)
    for start in (first, third):
        space.give(start)
    assert space.take(2 * UNIT) == third
    assert space.take(UNIT) == 8 * UNIT  # behind all others, as it would waste most of the first
    assert space.take(3 * UNIT) == first


def test_a_slot_that_is_much_too_long_is_taken_where_nothing_else_is_left_and_all_slots_go_with_the_last():
    space, (first, second) = space_of(4, 1, budget=5 * UNIT)
    space.give(first)
    assert space.take(UNIT) == first
    with pytest.warns(UserWarning, match="no room for 4 KiB more in /nowhere within memory.disk=20 KiB"):
        assert space.take(UNIT) is None
    assert space.is_full
    for start in (first, second):
        space.give(start)
    assert (space.take(5 * UNIT), space.lent_bytes) == (0, 5 * UNIT)


@given(st.lists(st.tuples(st.integers(1, 40 * UNIT), st.integers(0, 30)), max_size=60))
def test_lent_slots_never_meet_and_lie_within_the_file(orders):
    space, lent = SwapSpace(Endless(), budget=200 * UNIT), {}
    space._has_warned = True
    for num_bytes, other in orders:
        start = space.take(num_bytes)
        if start is None:
            assert space.size == 200 * UNIT
        else:
            assert start % UNIT == 0
            assert 0 <= start <= space.size - aligned(num_bytes)
            for s, n in lent.items():
                assert start + aligned(num_bytes) <= s or s + aligned(n) <= start
            lent[start] = num_bytes
        if lent and other % 2:
            start = sorted(lent)[other % len(lent)]
            space.give(start)
            del lent[start]
        assert sum(map(aligned, lent.values())) <= space.lent_bytes <= space.size
    for start in lent:
        space.give(start)
    assert space.lent_bytes == 0


@pytest.mark.parametrize("num_bytes", [1, 4096, 4097, 1 << 20, 3_000_001])
def test_a_buffer_begins_at_a_page_and_is_whole_pages(num_bytes):
    buffer = PageBuffers().take(num_bytes)
    assert buffer.data_ptr() % 4096 == buffer.numel() % 4096 == 0
    assert buffer.numel() >= num_bytes


def test_a_buffer_is_back_when_its_last_view_is_gone():
    pool = PageBuffers()
    buffer = pool.take(10_000)
    address, view = buffer.data_ptr(), buffer[100:200].view(5, 20)
    del buffer
    gc.collect()
    other = pool.take(10_000)
    assert other.data_ptr() != address
    assert pool.num_idle_bytes == 0
    view.fill_(7)
    assert view.sum() == 700
    del view
    gc.collect()
    assert pool.num_idle_bytes == other.numel()
    assert pool.take(10_000).data_ptr() == address


def test_few_bytes_wait_for_the_next():
    pool = PageBuffers(most_idle=100_000)
    buffers = [pool.take(40_960) for _ in range(5)]
    del buffers
    gc.collect()
    assert pool.num_idle_bytes == 81_920
