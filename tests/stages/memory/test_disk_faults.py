"""A disk may be slow, full, worn or wrong. None hangs, none corrupts, each is named."""

import errno
import gc
import mmap
import os
import time

import pytest
import torch
from disks import MIB, Fails, Slow, frame_of, put_all

from penstock.compression.buffers import size_class
from penstock.compression.errors import StageError
from penstock.stages.memory.disk import UNIT


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


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("dies")])
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
    assert disk.num_bytes == sum(map(size_class, (100, 5 * MIB, MIB)))


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


def test_a_thread_that_stops_at_an_exit_is_no_end(opened):
    disk, store = opened(Fails, depth=1)
    disk._file.writing = SystemExit(3)
    store.put("a", frame_of(100)[0])
    with pytest.raises(SystemExit):
        disk.drain()
    disk._file.writing = None
    frame, values = frame_of(100)
    store.put("b", frame)
    disk.drain()
    assert store.get("b").bytes.equal(values)


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
    assert disk.num_bytes == 0


def test_what_a_full_disk_has_no_space_for_stays_in_memory(opened, small_disk):
    disk, store = opened(path=small_disk)
    with pytest.warns(UserWarning, match=rf"no room for 96 KiB more in {small_disk}, where .* are free"):
        kept = put_all(store, [96 << 10] * 4)
    disk.drain()
    assert 96 << 10 <= disk.bytes_written <= 256 << 10
    assert all(store.get(key).bytes.equal(values) for key, values in kept.items())


def test_a_disk_that_is_full_where_nothing_was_reserved_ends_in_one_sentence(opened, small_disk, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    disk, store = opened(path=small_disk)
    kept = put_all(store, [64 << 10] * 2)
    disk.drain()
    store.put("large", frame_of(MIB)[0])
    with pytest.raises(StageError, match=f"1048576 bytes could not be written .* {small_disk}, found No"):
        disk.drain()
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
    assert disk.num_bytes in (0, MIB)
    store.drop(2)
    assert disk.num_bytes == 0


def test_a_thread_that_finds_no_memory_is_told_to_whoever_comes_next(opened, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    disk, _ = opened()
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", none)
        disk.write(frame_of(MIB - 1)[0])  # no whole page, so it moves through another buffer
        with pytest.raises(StageError, match=r"1048575 bytes could not be written .* Cannot allocate memory"):
            disk.drain()
    disk.write(frame_of(MIB)[0])
    disk.drain()
