"""The policies by their names, and the one that ignores orders."""

from small_policies import watched_lru

from penstock.pipeline.data.cache.policy import Job


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
