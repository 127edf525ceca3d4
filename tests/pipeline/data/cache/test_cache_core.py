"""Decisions of the broker, without sockets: calls of a policy, and refusals.

That bytes, pages and leases are always right is the law of ``test_cache_interleavings.py``."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from brokers import hello
from hypothesis import given, strategies as st
from small_policies import watched_lru

from penstock.compression.errors import TransportError
from penstock.pipeline.data.cache.core import Core, NotWelcome, Pages
from penstock.pipeline.data.cache.policy import Job, Times
from penstock.pipeline.data.cache.wire import pages_of, pieces


TIMES = Times(epoch=9.0, batch_io=0.4, sample_io=0.1, augmentation=0.1, training=0.2, hidden=0.3)


def core_of(num_pages=10) -> Any:
    return Core(watched_lru(num_pages * 10), Pages(num_pages, 10))


def begun(core, said, epoch=0, order: Sequence[int] = range(8), following=None):
    member = core.join(said, 0.0)
    core.begin(member, epoch, array("I", order), following, 0.0)
    return member


def store(core, member, index, num_bytes=10, *, epoch=0):
    """Use, offer and put a sample. Returns: whether it was taken."""
    core.use(member, epoch, [index], 0.0)
    (stored,) = core.offer(member, epoch, [(index, num_bytes, b"")], 0.0)
    if stored is not None:
        core.wrote(member)
    return stored is not None


def calls(core, *kinds):
    return [call[0::2] for call in core.policy.calls if call[0] in kinds]


def test_connections_of_a_run_are_one_reader():
    core = core_of()
    one, two = begun(core, hello(num_samples=8)), begun(core, hello(num_samples=8))
    assert core.use(one, 0, [3], 0.0) == [None]
    assert core.use(two, 0, [3], 0.0) == [None]
    assert core.offer(one, 0, [(3, 10, b"")], 0.0) != [None]
    assert core.offer(two, 0, [(3, 10, b"")], 0.0) == [None]
    core.wrote(one)
    assert core.use(two, 0, [3], 0.0)[0].entry == ("data:d", 3)
    assert calls(core, "use", "offer", "begin") == [("begin", list(range(8))), ("use", 3), ("offer", 3)]
    assert core.status(0.0)["jobs"][0]["uses"] == 1


def test_runs_share_samples_by_the_name_of_their_data_alone():
    core = core_of()
    one, two = begun(core, hello("a", num_samples=8)), begun(core, hello("b", num_samples=8))
    begun(core, hello("a", run="2", num_samples=8))
    named = [(job["job"], job["run"]) for job in core.status(0.0)["jobs"]]
    assert named == [("a", "1"), ("b", "1"), ("a", "2")]
    store(core, one, 3)
    assert core.use(two, 0, [3], 0.0)[0] is not None
    assert core.offer(two, 0, [(3, 10, b"")], 0.0) == [None]
    called_as_data = begun(core, hello("d", data="c", num_samples=8))
    assert core.use(called_as_data, 0, [3], 0.0) == [None]
    store(core, begun(core, hello("e", data="a", num_samples=8)), 4)
    assert core.use(one, 0, [4], 0.0) == [None]


def test_connections_that_contradict_each_other_are_refused():
    core = core_of()
    begun(core, hello(num_samples=8))
    for changed in ({"num_samples": 9}, {"data": "e"}, {"epochs": 7}):
        with pytest.raises(NotWelcome, match="job a has connections that differ"):
            core.join(replace(hello(num_samples=8), **changed), 0.0)
    with pytest.raises(NotWelcome, match="data d has 8 samples for job a and 9 for job b"):
        core.join(hello("b", num_samples=9), 0.0)


def test_what_makes_room_for_another_sample_of_the_same_offer_is_not_accepted():
    core = core_of(num_pages=2)
    member = begun(core, hello(num_samples=8))
    core.use(member, 0, [0, 1, 2], 0.0)
    accepted = core.offer(member, 0, [(0, 10, b""), (1, 10, b""), (2, 20, b"")], 0.0)
    assert [stored is not None for stored in accepted] == [False, False, True]
    core.wrote(member)
    assert list(core.pages.entries) == [("data:d", 2)]


def test_a_changed_sample_is_dropped_and_may_be_offered_anew():
    core = core_of()
    member = begun(core, hello(num_samples=8))
    store(core, member, 3)
    core.drop(member, 3, b"another stamp")
    assert core.use(member, 0, [3], 0.0) != [None]
    core.drop(member, 3, b"")
    assert core.use(member, 0, [3], 0.0) == [None]
    assert core.offer(member, 0, [(3, 10, b"new")], 0.0) != [None]
    core.wrote(member)
    assert core.use(member, 0, [3], 0.0)[0].stamp == b"new"


def test_samples_that_the_policy_cannot_expect_are_only_looked_for():
    core = core_of()
    member = begun(core, hello(num_samples=8), order=[1, 2])
    assert not store(core, member, 3)
    assert not store(core, member, 1, epoch=1)
    assert not store(core, core.join(hello("b", num_samples=8), 0.0), 1)
    assert calls(core, "use", "offer") == []


def test_the_policy_is_asked_in_whole_pages():
    core = core_of(num_pages=3)
    member = begun(core, hello(num_samples=8))
    assert not store(core, member, 2, 31)
    assert store(core, member, 3, 25)
    assert [call[2:] for call in core.policy.calls if call[0] == "offer"] == [(2, 40), (3, 30)]


def test_times_and_epochs_reach_the_policy():
    core = core_of()
    member = core.join(hello(num_samples=8), 0.0)
    core.measured(member, TIMES, 0.0)
    core.begin(member, 0, array("I", [1, 0]), array("I", [0, 1]), 0.0)
    core.begin(member, 0, array("I", [0, 1]), None, 0.0)  # said before
    job = Job(name="run:1:a", data="data:d", num_samples=8, batch_size=4)
    assert core.policy.calls == [
        ("join", job), ("join", replace(job, times=TIMES)), ("begin", "run:1:a", [1, 0], [0, 1])
    ]  # fmt: skip


def test_what_cannot_be_is_refused_before_the_policy_hears_it():
    core = core_of()
    member = begun(core, hello(num_samples=8))
    heard = len(core.policy.calls)
    for call, *said in (
        (core.use, 0, [8], 0.0),
        (core.use, 0, [1, 1], 0.0),
        (core.offer, 0, [(8, 1, b"")], 0.0),
        (core.drop, 8, b""),
        (core.begin, 1, array("I", [8]), None, 0.0),
        (core.begin, 1, array("I", [1, 1]), None, 0.0),
        (core.begin, 1, array("I", [1]), array("I", [8]), 0.0),
        (core.measured, replace(TIMES, epoch=-1.0), 0.0),
        (core.measured, replace(TIMES, epoch=1e300), 0.0),
    ):
        with pytest.raises(TransportError):
            call(member, *said)
        assert len(core.policy.calls) == heard, said


def test_the_predicted_end_is_that_of_what_is_left_at_the_pace_that_was_seen():
    core = core_of()
    member = begun(core, hello(num_samples=8, epochs=3))
    (row,) = core.status(0.0)["jobs"]
    assert row["finish_seconds"] is None
    core.use(member, 0, range(4), 2.0)
    (row,) = core.status(2.0)["jobs"]
    assert (row["progress"], row["finish_seconds"]) == (0.5, 10.0)  # 20 samples of 0.5 s
    core.begin(member, 1, array("I", range(8)), None, 4.0)  # 4 samples in 4 s; nothing is seen of this one
    (row,) = core.status(4.0)["jobs"]
    assert (row["epoch"], row["progress"], row["finish_seconds"]) == (1, 0.0, 16.0)


@pytest.mark.parametrize(("num_bytes", "needed"), [(0, 1), (1, 1), (10, 1), (11, 2), (20, 2), (21, 3)])
def test_a_sample_takes_whole_pages_and_an_empty_one_a_page(num_bytes, needed):
    assert pages_of(num_bytes, 10) == needed


def test_pages_are_taken_once_and_side_by_side_where_they_are_free():
    pages: Any = Pages(5, 10)
    first, second = (pages.reserve(("d", index), 20, b"") for index in range(2))
    assert (list(first.pages), list(second.pages)) == ([0, 1], [2, 3])
    assert pages.reserve(("d", 2), 20, b"") is None
    assert pages.num_free == 1
    pages.free(("d", 0))
    assert list(pages.reserve(("d", 3), 30, b"").pages) == [0, 1, 4]


def test_pages_side_by_side_are_one_piece():
    assert pieces([3, 4, 7], 25, 10) == [(30, 50), (70, 75)]


@given(st.permutations(range(12)), st.integers(0, 60))
def test_the_pieces_are_the_bytes_one_by_one(order, num_bytes):
    slow = [order[at // 5] * 5 + at % 5 for at in range(num_bytes)]
    assert [at for start, end in pieces(order, num_bytes, 5) for at in range(start, end)] == slow
