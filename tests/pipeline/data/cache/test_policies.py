"""The policies by their names, and the one that ignores orders."""

import pytest
from small_policies import watched_lru

from penstock import ConfigError
from penstock.pipeline.data.cache.policies import POLICIES, policy
from penstock.pipeline.data.cache.policy import Job


def test_the_policies_are_known_by_name():
    names = {"next_use": "NextUse", "gain": "Gain", "lru": "Lru"}
    assert {name: type(policy(name, 7)).__name__ for name in POLICIES} == names
    with pytest.raises(ConfigError, match=r"belady is no policy.*known are next_use, gain, lru"):
        policy("belady", 1)
    assert all(policy(name, 7).leave("a", 0.0) == () for name in POLICIES)


def test_lru_lets_go_what_was_used_longest_ago():
    kept = watched_lru(30)
    for name, data in (("0", "d"), ("1", "e")):
        kept.join(Job(name=name, data=data, num_samples=9, batch_size=3), 0.0)
    assert all(kept.takes("0", index) for index in (0, 1, 2))
    kept.use("0", 0, 0.0)
    assert kept.offer("1", 7, 20, 0.0) == (("e", 7), (("d", 1), ("d", 2)))
    assert kept.offer("1", 8, 31, 0.0) == (None, ())
    assert kept.offer("1", 7, 20, 0.0) == (("e", 7), ())
    assert kept.leave("1", 0.0) == (("e", 7),)
    assert all(kept.takes("0", index) for index in (3, 4))
    assert kept.offer("0", 5, 10, 0.0).evicted == (("d", 0),)
    kept.drop(("d", 3))
    assert kept.offer("0", 6, 20, 0.0).evicted == (("d", 4),)  # what is gone does not go again
