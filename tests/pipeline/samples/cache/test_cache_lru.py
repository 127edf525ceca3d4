"""The policies by their names, and the one that looks at no order."""

import pytest
from small_policies import watched_lru

from penstock import ConfigError
from penstock.pipeline.samples.cache.policies import DEFAULT, POLICIES, policy
from penstock.pipeline.samples.cache.policy import Job

pytestmark = pytest.mark.slow


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
    assert kept.offer("0", 5, 10, 0.0).freed == (("d", 0),)
    kept.drop(("d", 3))
    assert kept.offer("0", 6, 20, 0.0).freed == (("d", 4),)  # what is gone does not go again
