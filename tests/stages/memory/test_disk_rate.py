"""What is measured of a disk is what went over it."""

from __future__ import annotations

import math

import pytest
from disks import Slow

from penstock.stages.memory.disk import Disk
from penstock.stages.memory.disk_rate import disk_rate, timed
from penstock.stages.memory.room import DiskOptions

KIB = 1 << 10


@pytest.mark.parametrize("num_frames", [1, 4, 11])
def test_all_is_written_and_read_once_and_nothing_stays(num_frames, tmp_path):
    disk, num_bytes = Disk(DiskOptions(path=tmp_path)), num_frames * 64 * KIB
    try:
        for times in (1, 2):
            rates = timed(disk, num_frames=num_frames, frame_bytes=64 * KIB)
            assert all(0 < rate < math.inf for rate in rates)
            assert (disk.bytes_written, disk.bytes_read) == (times * num_bytes, times * num_bytes)
            assert disk.num_bytes == disk.memory.device.now == 0
    finally:
        disk.close()


def test_the_rates_are_those_of_the_disk_and_several_requests_are_under_way(tmp_path):
    disk = Disk(DiskOptions(path=tmp_path), slab=Slow)
    try:
        written, read = timed(
            disk, num_frames=8, frame_bytes=64 * KIB
        )  # by four at a time: twice Slow.seconds
    finally:
        disk.close()
    alone = 64 * KIB / Slow.seconds
    assert 2 * alone < written < 4.01 * alone
    assert 2 * alone < read < 4.01 * alone


def test_where_no_file_can_be_there_is_no_rate(tmp_path):
    assert disk_rate(DiskOptions(path=tmp_path / "nowhere")) is None
