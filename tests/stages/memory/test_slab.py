"""The file of a rank: without a name, past the cache where that can be had; its extents and buffers."""

import errno
import gc
import mmap
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.compression.errors import ConfigError, StageError
from penstock.stages.memory import swap_file
from penstock.stages.memory.disk import PageBuffers
from penstock.stages.memory.swap_file import UNIT, Extents, Slab, aligned, worded


def pages(content):
    own = mmap.mmap(-1, UNIT)
    own[:] = content * (UNIT // len(content))
    return memoryview(own)


def cannot_reserve(patch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    patch.setattr(os, "posix_fallocate", refuse)


@pytest.mark.parametrize(
    "lacks",
    [
        lambda patch: None,
        lambda patch: patch.setattr(swap_file, "_UNNAMED", 0),  # so its name is taken away at once
        cannot_reserve,
    ],
    ids=["nothing", "files without a name", "reserving"],
)
def test_nothing_is_seen_in_the_folder_and_bytes_come_back_whatever_a_file_system_lacks(
    lacks, tmp_path, monkeypatch
):
    lacks(monkeypatch)
    slab = Slab(tmp_path)
    assert slab.grow(0, 2 * UNIT)
    assert list(tmp_path.iterdir()) == []
    slab.write_all(pages(b"penstock"), UNIT)
    found = pages(b"-")
    slab.read_all(found, UNIT)
    assert bytes(found) == b"penstock" * (UNIT // 8)
    slab.close()


def test_a_file_system_that_has_no_way_past_the_cache_is_written_through_it(tmp_path, monkeypatch):
    opened = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    slab = Slab(tmp_path)
    assert not slab.direct
    assert slab.grow(0, UNIT)
    slab.write_all(memoryview(b"short"), 3)  # no page, no unit
    found = memoryview(bytearray(5))
    slab.read_all(found, 3)
    assert bytes(found) == b"short"
    slab.close()


def test_space_that_is_not_there_is_refused_and_none_is_kept(small_disk):
    slab = Slab(small_disk)
    assert slab.grow(0, 128 << 10)
    free = os.statvfs(small_disk).f_bfree
    assert not slab.grow(128 << 10, 1 << 20)
    assert os.statvfs(small_disk).f_bfree == free
    slab.close()


def test_a_folder_that_takes_no_file_is_refused_by_name(tmp_path):
    (tmp_path / "file").touch()
    for folder, found in ((tmp_path / "nowhere", "nowhere"), (tmp_path / "file", "file")):
        with pytest.raises(ConfigError, match=f"found .*/{found} .Not a directory.*memory.path="):
            Slab(folder)


def test_what_a_system_refuses_is_one_sentence_with_the_frame_the_folder_and_the_remedy():
    full = worded(OSError(errno.ENOSPC, "No space"), "5 bytes could not be written to", Path("/d"))
    assert isinstance(full, StageError)
    assert re.search(
        "5 bytes could not be written to .* /d, found No space.*memory.disk=.*memory.path=", str(full)
    )
    error = ValueError("ours")
    assert worded(error, "", Path("/d")) is error


def of(*pieces) -> Any:
    extents = Extents()
    extents.grow(sum(pieces) * UNIT)
    return extents, [extents.take(piece * UNIT) for piece in pieces]


def test_lengths_are_whole_units():
    assert [aligned(n) for n in (0, 1, UNIT, UNIT + 1)] == [0, UNIT, UNIT, 2 * UNIT]


def test_the_smallest_room_that_fits_is_taken():
    extents, (first, _, third, _) = of(4, 1, 2, 1)
    extents.give(first)
    extents.give(third)
    assert extents.take(2 * UNIT) == third
    assert extents.take(UNIT) == first
    assert extents.take(4 * UNIT) is None
    assert extents.take(3 * UNIT) == first + UNIT


def test_a_file_that_grows_joins_its_free_end():
    extents, (_, last) = of(1, 2)
    assert extents.tail == 0
    extents.give(last)
    assert extents.tail == 2 * UNIT
    extents.grow(UNIT)
    assert (extents.tail, extents.size) == (3 * UNIT, 4 * UNIT)
    assert extents.take(3 * UNIT) == UNIT


@given(st.lists(st.tuples(st.integers(0, 5 * UNIT), st.integers(0, 30)), max_size=60))
def test_lent_extents_never_meet_and_all_room_comes_back(orders):
    extents, lent = Extents(), {}
    extents.grow(24 * UNIT)
    for num_bytes, other in orders:
        start = extents.take(num_bytes)
        if start is None:
            free = 24 - sum(aligned(n) // UNIT for n in lent.values())
            used = {unit for s, n in lent.items() for unit in range(s // UNIT, (s + aligned(n)) // UNIT)}
            runs = "".join("x" if unit in used else "." for unit in range(24)).split("x")
            assert max(map(len, runs)) * UNIT < aligned(num_bytes) <= 24 * UNIT or free == 0
        elif num_bytes:
            assert start % UNIT == 0
            assert 0 <= start <= 24 * UNIT - aligned(num_bytes)
            for s, n in lent.items():
                assert start + aligned(num_bytes) <= s or s + aligned(n) <= start
            lent[start] = num_bytes
        if lent and other % 2:
            start = sorted(lent)[other % len(lent)]
            extents.give(start)
            del lent[start]
        assert extents.lent_bytes == sum(map(aligned, lent.values()))
    for start in lent:  # in the order in which they were lent: each is one room with its neighbours
        extents.give(start)
    assert extents.take(24 * UNIT) == 0


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
