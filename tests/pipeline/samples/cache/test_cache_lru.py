"""The policies that look at no order, of the library and of the bench."""

from __future__ import annotations

import pytest
from cache_simulator import CONTESTANTS
from kept import Kept

from penstock import ConfigError
from penstock.pipeline.samples.cache.policies import DEFAULT, POLICIES, policy
from penstock.pipeline.samples.cache.policy import Job

pytestmark = pytest.mark.slow


def started(name: str, slots: int, *data: str) -> Kept:
    """Jobs 0, 1, ... that read ``data``."""
    kept = Kept(CONTESTANTS[name](10 * slots))
    for number, one in enumerate(data):
        kept.join(Job(name=str(number), data=one, num_samples=9, batch_size=3), 0.0)
        kept.begin(str(number), range(9), range(9), 0.0)
    return kept


def test_the_policies_are_known_by_name():
    assert set(POLICIES) == {"next_use", "gain", "lru"}
    assert type(policy(DEFAULT, 1)).__name__ == "NextUse"
    assert {name: policy(name, 7).capacity for name in POLICIES} == dict.fromkeys(POLICIES, 7)
    with pytest.raises(ConfigError, match=r"belady is no policy.*known are next_use, gain, lru"):
        policy("belady", 1)


@pytest.mark.parametrize("name", POLICIES)
def test_who_has_not_joined_is_refused_and_no_capacity_below_0(name: str):
    made = policy(name, 10)
    with pytest.raises(ConfigError, match="a has not; join first"):
        made.use("a", 0, 0.0)
    with pytest.raises(ConfigError, match="a has not; join first"):
        made.offer("a", 0, 1, 0.0)
    assert made.leave("a", 0.0) == ()
    with pytest.raises(ConfigError, match="0 bytes or more, found -1"):
        policy(name, -1)


def test_never_evict_keeps_what_came_first_while_somebody_reads_it():
    kept = started("never_evict", 2, "d", "d")
    assert [kept.takes("0", index) for index in (0, 1, 2)] == [True, True, False]
    assert kept.use("1", 1, 0.0) == (("d", 1), ())
    kept.drop(("d", 1))
    assert kept.takes("1", 5)
    assert dict(kept.held) == {"0": 10, "1": 10}
    assert kept.leave("0", 0.0) == ()
    assert dict(kept.held) == {"1": 20}
    assert set(kept.leave("1", 0.0)) == {("d", 0), ("d", 5)}


def test_lru_lets_go_what_was_used_longest_ago():
    kept = started("lru", 3, "d", "e")
    assert all(kept.takes("0", index) for index in (0, 1, 2))
    kept.use("0", 0, 0.0)
    assert kept.offer("1", 7, 20, 0.0) == (("e", 7), (("d", 1), ("d", 2)))
    assert kept.offer("1", 8, 31, 0.0) == (None, ())
    assert kept.offer("1", 7, 20, 0.0) == (("e", 7), ())
    assert kept.leave("1", 0.0) == (("e", 7),)
    assert all(kept.takes("0", index) for index in (3, 4))
    assert kept.offer("0", 5, 10, 0.0).freed == (("d", 0),)
    kept.drop(("d", 3))
    assert kept.offer("0", 6, 20, 0.0).freed == (("d", 4),)  # what is gone does not go again


def test_static_split_gives_each_its_part_even_of_one_data_set():
    kept = started("static_split", 4, "d", "d")
    assert [kept.takes("0", index) for index in (0, 1, 2)] == [True, True, False]
    assert [kept.takes("1", index) for index in (0, 3)] == [True, True]
    assert set(kept.there) == {("0", 0), ("0", 1), ("1", 0), ("1", 3)}
    assert set(kept.leave("0", 0.0)) == {("0", 0), ("0", 1)}
    assert [kept.takes("1", index) for index in (4, 5, 6)] == [True, True, False]


def test_static_split_makes_room_for_who_comes_out_of_what_is_too_much():
    kept = started("static_split", 4, "d")
    assert all(kept.takes("0", index) for index in (0, 1, 2, 3))
    kept.join(Job(name="1", data="e", num_samples=9, batch_size=3), 0.0)
    assert len(kept.there) == 4
    assert kept.offer("1", 0, 10, 0.0) == (("1", 0), (("0", 3),))
    assert kept.offer("1", 1, 10, 0.0) == (("1", 1), (("0", 2),))
    assert not kept.takes("1", 2)
