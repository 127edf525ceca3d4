"""The file of a rank: without a name, past the cache where that can be had; its slots and buffers."""

import errno
import fcntl
import gc
import mmap
import os
from pathlib import Path
from typing import Any

import pytest
from disks import refusing
from hypothesis import given
from hypothesis import strategies as st

from penstock.compression.errors import ConfigError
from penstock.stages.memory.disk import UNIT, PageBuffers, SwapFile, SwapSpace, aligned


def pages(content):
    own = mmap.mmap(-1, UNIT)
    own[:] = content * (UNIT // len(content))
    return memoryview(own)


@pytest.mark.parametrize("reserves", [True, False])
def test_nothing_is_seen_in_the_folder_and_bytes_come_back_whatever_a_file_system_lacks(
    reserves, tmp_path, monkeypatch
):
    if not reserves:
        monkeypatch.setattr(os, "posix_fallocate", refusing(errno.EOPNOTSUPP))
    file = SwapFile(tmp_path)
    assert file.grow(0, 2 * UNIT)
    assert list(tmp_path.iterdir()) == []
    file.move_all(file.write, pages(b"penstock"), UNIT)
    found = pages(b"-")
    file.move_all(file.read, found, UNIT)
    assert bytes(found) == b"penstock" * (UNIT // 8)
    file.close()


def test_a_file_system_that_has_no_way_past_the_cache_is_written_through_it(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "fcntl", refusing(errno.EINVAL))
    file = SwapFile(tmp_path)
    assert not file.direct
    assert file.grow(0, UNIT)
    file.move_all(file.write, memoryview(b"short"), 3)  # no page, no unit
    found = memoryview(bytearray(5))
    file.move_all(file.read, found, 3)
    assert bytes(found) == b"short"
    file.close()


def test_space_that_is_not_there_is_refused_and_none_is_kept(small_disk):
    file = SwapFile(small_disk)
    assert file.grow(0, 128 << 10)
    free = os.statvfs(small_disk).f_bfree
    assert not file.grow(128 << 10, 1 << 20)
    assert os.statvfs(small_disk).f_bfree == free
    file.close()


def test_a_folder_that_takes_no_file_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    for folder, found in ((tmp_path / "nowhere", "nowhere"), (tmp_path / "file", "file")):
        with pytest.raises(ConfigError, match=f"found .*/{found} .Not a directory.*memory.path="):
            SwapFile(folder)


def test_lengths_are_whole_units():
    assert [aligned(n) for n in (0, 1, UNIT, UNIT + 1)] == [0, UNIT, UNIT, 2 * UNIT]


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


def test_a_slot_that_is_much_too_long_is_taken_where_nothing_else_is_left():
    space, (first, _) = space_of(4, 1, budget=5 * UNIT)
    space.give(first)
    assert space.take(UNIT) == first
    with pytest.warns(UserWarning, match="no room for 4 KiB more in /nowhere within memory.disk=20 KiB"):
        assert space.take(UNIT) is None
    assert space.is_full


def test_when_nothing_is_lent_any_more_slots_have_other_sizes():
    space, lent = space_of(1, 1, 1, 1, budget=4 * UNIT)
    for start in lent:
        space.give(start)
    assert (space.take(4 * UNIT), space.lent_bytes) == (0, 4 * UNIT)


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
