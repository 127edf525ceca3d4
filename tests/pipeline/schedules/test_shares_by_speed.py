"""The rule of shares by speed: literals, what holds of any speeds, and when it stays as it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.runtime.load_balancing import better, by_speed, smoothed

SECONDS = st.lists(st.floats(0.001, 1000), min_size=1, max_size=6)


@pytest.mark.parametrize(
    ("seconds", "number", "counts"),
    [
        ((1, 1), 8, (4, 4)),
        ((1, 3), 8, (6, 2)),
        ((1, 2), 8, (5, 3)),
        ((1, 8), 9, (8, 1)),
        ((1, 100), 8, (7, 1)),  # or nobody would see it become faster
        ((100, 1, 100), 3, (1, 1, 1)),
        ((1, 1, 2), 1, (1, 0, 0)),
        ((2, 1, 1), 8, (2, 3, 3)),
        ((1, 1, 1), 8, (3, 3, 2)),
    ],
)
def test_literals(seconds, number, counts):
    assert by_speed(seconds, number) == counts


@given(SECONDS, st.integers(1, 64))
def test_all_are_dealt_nobody_who_is_faster_gets_less_and_nobody_is_far_from_what_is_due(seconds, number):
    counts, total = by_speed(seconds, number), sum(1 / one for one in seconds)
    assert sum(counts) == number
    assert min(counts) >= (number >= len(seconds))
    for mine, ours in zip(seconds, counts, strict=True):
        for theirs, other in zip(seconds, counts, strict=True):
            assert mine > theirs or ours >= other - (mine == theirs)
    due = [number / one / total for one in seconds]
    if min(due) >= 1:
        assert all(abs(count - one) < 1 + 1e-9 for count, one in zip(counts, due, strict=True))


def test_shares_change_only_where_the_slowest_gains_five_percent():
    assert better((4, 4), (1.0, 1.0)) is None
    assert better((4, 4), (1.0, 1.31)) is None  # 5 against 5.24
    assert better((4, 4), (1.0, 1.32)) == (5, 3)  # 5 against 5.28
    assert better((5, 3), (1.0, 1.0)) == (4, 4)
    assert better((1, 7), (2.0, 1.0)) == (3, 5)


@given(SECONDS.filter(lambda seconds: len(seconds) > 1), st.integers(2, 64))
def test_what_was_taken_up_stays(seconds, number):
    assert better(by_speed(seconds, number), seconds) is None


def test_seconds_follow_what_lasts():
    found = 0.0
    for _ in range(3):
        found = smoothed(found, 1.0)
    assert found == 1.0
    assert smoothed(found, 11.0) == pytest.approx(4.0)
    for _ in range(2):
        found = smoothed(found, 2.0)
    assert found > 1.5
