"""The bytes of a day: against a cap, over midnight, and together with other processes."""

import json

import pytest

from penstock.stages.memory import daily_bytes
from penstock.stages.memory.daily_bytes import DailyBytes


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
