"""The bytes of a day: against a cap, over midnight, and together with other processes."""

import json
import threading

import pytest
from disks import MIB, put_all

from penstock.compression.memory import new_bytes
from penstock.compression.pool import Frame
from penstock.stages.memory import daily_bytes
from penstock.stages.memory.daily_bytes import COUNT_FILE, DailyBytes
from penstock.stages.memory.disk import Disk
from penstock.stages.memory.extents import UNIT
from penstock.stages.memory.room import DiskOptions
from penstock.stages.memory.store import UnpooledBuffers

pytestmark = pytest.mark.slow


def test_a_day_ends_at_its_cap_and_begins_anew_at_midnight():
    dates = ["2026-01-01"]
    bytes_today = DailyBytes(100, path=None, day=lambda: dates[-1])
    bytes_today.add(60)
    assert bytes_today.allows(40)
    assert not bytes_today.allows(41)
    dates.append("2026-01-02")
    assert bytes_today.allows(100)
    assert bytes_today.num_bytes == 0


def test_without_a_cap_nothing_is_kept(tmp_path):
    bytes_today = DailyBytes(None, path=tmp_path / "count")
    bytes_today.add(1 << 40)
    assert bytes_today.allows(1 << 40)
    bytes_today.flush()
    assert list(tmp_path.iterdir()) == []


def test_the_next_process_goes_on_and_those_beside_count_too(tmp_path, monkeypatch):
    monkeypatch.setattr(daily_bytes, "_STEP", 10)
    path = tmp_path / "count"
    one, two = (DailyBytes(100, path=path, day=lambda: "2026-01-01") for _ in range(2))
    one.add(30)
    two.add(40)
    assert two.num_bytes == 70
    one.add(9)  # fewer than a step
    assert one.num_bytes == 39
    one.flush()
    assert one.num_bytes == 79
    assert json.loads(path.read_text()) == {"day": "2026-01-01", "bytes": 79}
    three = DailyBytes(100, path=path, day=lambda: "2026-01-01")
    assert not three.allows(22)
    assert DailyBytes(100, path=path, day=lambda: "2026-01-02").num_bytes == 0


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"day": "2026-01-01"}', '{"day": "2026-01-01", "bytes": "9"}']
)
def test_a_count_that_says_nothing_is_none(text, tmp_path):
    (tmp_path / "count").write_text(text)
    assert DailyBytes(100, path=tmp_path / "count", day=lambda: "2026-01-01").num_bytes == 0


def test_the_cap_of_a_day_is_told_once_and_later_frames_stay(opened):
    disk, store = opened(per_day="1MiB")
    kept = put_all(store, [MIB // 2])
    with pytest.warns(
        UserWarning, match=r"disks wear by what is written, and memory.disk_per_day=1 MiB is reached"
    ):
        kept |= {f"more {key}": value for key, value in put_all(store, [MIB // 2 + 1] * 2).items()}
    disk.drain()
    assert disk.bytes_written == MIB // 2
    del kept[0]
    assert all(store.get(int(key[5:])).bytes.equal(value) for key, value in kept.items())


def test_the_day_is_counted_in_a_folder_that_a_person_named(opened, tmp_path):
    for expected in (False, True):
        disk, store = opened(per_day="1MiB", shared=True)
        if expected:
            with pytest.warns(UserWarning, match="is reached"):
                put_all(store, [MIB // 2 + UNIT])
        else:
            put_all(store, [MIB // 2 + UNIT])
        disk.close()
    assert [path.name for path in tmp_path.iterdir()] == ["penstock_written_today.json"]


def test_a_count_of_the_day_that_cannot_be_kept_stops_nobody(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    disk = Disk(DiskOptions(path=folder, per_day="100GiB"))
    (folder / COUNT_FILE).unlink()
    folder.rmdir()
    done = []

    def write():
        for _ in range(70):
            disk.write(Frame(new_bytes(1 << 20), 1 << 20, UnpooledBuffers()))
        disk.drain()
        disk.close()
        done.append(disk.bytes_written)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    with pytest.warns(UserWarning, match="the bytes of a day cannot be kept in"):
        thread.join(60)
    assert done == [70 << 20]
    assert disk.memory.leaving.now == 0
