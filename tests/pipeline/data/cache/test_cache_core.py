"""The broker without sockets: its decisions, and the laws of random interleavings, held against a model."""

import functools
import random
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from brokers import Watched, hello, watched_lru
from hypothesis import given
from hypothesis import strategies as st

from penstock.compression.errors import TransportError
from penstock.pipeline.data.cache.core import Core, NotWelcome, Pages
from penstock.pipeline.data.cache.gain import Gain
from penstock.pipeline.data.cache.next_use import Expected, NextUse
from penstock.pipeline.data.cache.policies import POLICIES, Lru
from penstock.pipeline.data.cache.policies import policy as new_policy
from penstock.pipeline.data.cache.policy import Job, Times
from penstock.pipeline.data.cache.wire import NOWHERE, pieces

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


def test_runs_take_turns_for_their_first_epoch():
    core: Any = Core(watched_lru(100), Pages(10, 10), alone=True)
    a, b, c = (core.join(hello(name, num_samples=8), 0.0) for name in "abc")
    assert [core.has_turn(member, 1.0) for member in (b, a, c, core.join(a.run.hello, 1.0))] == [0, 1, 0, 1]
    core.begin(b, 0, array("I", range(8)), None, 1.0)  # it does not wait
    assert [core.has_turn(member, 2.0) for member in (a, b, c)] == [0, 1, 0]
    core.measured(b, TIMES, 3.0)
    assert [core.has_turn(member, 3.0) for member in (a, b, c)] == [1, 1, 0]
    for epoch in range(2):
        assert not core.has_turn(c, 4.0)
        core.begin(a, epoch, array("I", range(8)), array("I", range(8)), 4.0)  # nothing to measure
    d = core.join(hello("d", num_samples=8), 5.0)
    core.use(c, NOWHERE, [1], 6.0)
    assert not core.has_turn(d, 65.0)
    assert core.has_turn(d, 66.0)  # c has asked for nothing for a minute


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
    with pytest.raises(NotWelcome, match=r"cache\.share= is for a cache with policy=gain, found another"):
        core.join(replace(hello("b", num_samples=8), share=0.5), 0.0)
    shared: Any = Core(Watched(Gain(100)), Pages(10, 10))
    for job in "ab":
        shared.join(replace(hello(job), share=0.4), 0.0)
    with pytest.raises(NotWelcome, match=r"1 at most, found cache\.share=0\.3 with 0\.2 left"):
        shared.join(replace(hello("c"), share=0.3), 0.0)
    shared.join(replace(hello("c"), share=0.2), 0.0)


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


def test_pages_are_taken_once_and_side_by_side_where_they_are_free():
    pages: Any = Pages(5, 10)
    first, second = (pages.reserve(("d", index), 20, b"") for index in range(2))
    assert (list(first.pages), list(second.pages)) == ([0, 1], [2, 3])
    assert pages.reserve(("d", 2), 20, b"") is None
    assert len(pages.unused) == 1
    pages.free(("d", 0))
    assert list(pages.reserve(("d", 3), 30, b"").pages) == [0, 1, 4]


PAGE, NUM_SAMPLES = 8, 10
JOBS = [("a", "d"), ("b", "d"), ("c", "e"), ("d", "c")]  # two share; one is called as somebody's data


class World:
    """Connections, a slab, and what is known to be in it without asking the core."""

    def __init__(self, policy, num_pages):
        self.core: Any = Core(Watched(policy(num_pages * PAGE)), Pages(num_pages, PAGE))
        self.slab, self.num_pages = bytearray(num_pages * PAGE), num_pages
        self.members = []
        self.true = {}  # what was put as a stored sample, byte for byte
        self.stamp = self.leases = 0
        self.now = 0.0

    def do(self, kind, who, index, size):
        """One request; ``who`` picks the connection."""
        self.now += 1.0
        if kind == "join" or not self.members:
            job, data = JOBS[who % len(JOBS)]
            if len(self.members) < 6:
                self.members.append(self.core.join(hello(job, data=data, num_samples=NUM_SAMPLES), self.now))
            return
        member = self.members[who % len(self.members)]
        getattr(self, kind)(member, index, size)

    def leave(self, member, index, size):
        self.members.remove(member)
        self.core.leave(member, self.now)

    def begin(self, member, index, size):
        order = random.Random(index).sample(range(NUM_SAMPLES), 1 + size % NUM_SAMPLES)
        following = None if index % 3 == 0 else array("I", order[::-1])
        self.core.begin(member, member.run.epoch + index % 3 - 1, array("I", order), following, self.now)

    def use(self, member, index, size):
        asked = [(index + step) % NUM_SAMPLES for step in range(1 + size % 4)]
        found = self.core.use(member, self.epoch(member, size), asked, self.now)
        for at, stored in zip(asked, found, strict=True):
            if stored is not None:
                assert stored.entry in member.run.places(at)
                assert stored in member.leased
                self.leases += 1

    def load(self, member, index, size):
        """Load as a loader does: use, offer, and put, mostly all of it."""
        self.use(member, index, size)
        self.offer(member, index, size)
        for _ in range(size % 4):
            self.put(member, index, 40)

    def offer(self, member, index, size):
        samples = []
        for step in range(1 + size % 4):
            self.stamp += 1
            sample = (index + step) % NUM_SAMPLES
            samples.append((sample, (size * (step + 1)) % 40, self.stamp.to_bytes(4, "big")))
        accepted = self.core.offer(member, self.epoch(member, size), samples, self.now)
        assert [stored for stored in accepted if stored is not None and stored.num_bytes] == member.writing

    def put(self, member, index, size):
        """The first sample of what was accepted, as the broker moves it."""
        if not member.writing:
            return
        stored = member.writing[0]
        data = self.true[stored] = random.Random(stored.stamp).randbytes(stored.num_bytes)
        if stored.kept:
            for start, end in pieces(stored.pages, stored.num_bytes, PAGE):
                self.slab[start:end], data = data[: end - start], data[end - start :]
        self.core.wrote(member)

    def drop(self, member, index, size):
        stored = self.core.pages.whole(member.run.places(index)[0])
        self.core.drop(member, index, stored.stamp if stored is not None and size % 2 else b"")
        self.core.policy.calls.append(("changed", member.run.job.name, index))

    def measured(self, member, index, size):
        seconds = [1.0 + index, 0.1 * size, 0.1, 0.1, 0.1, 0.01 * index]
        self.core.measured(member, Times(**dict(zip(Times.__slots__, seconds, strict=True))), self.now)

    def done(self, member, index, size):
        self.core.release(member)
        assert not member.leased
        assert not member.writing

    def epoch(self, member, size):
        return max(0, member.run.epoch + (size % 7 == 0))

    def hold(self):
        """The laws, after every request."""
        core = self.core
        pages, policy = core.pages, core.policy
        assert pages.entries.keys() == policy.entries.keys()
        there = [*pages.entries.values(), *pages.given_up]
        out = [page for stored in there for page in stored.pages]
        assert len(out) == len(set(out)), "a page is in two entries"
        assert len(out) + len(pages.unused) == self.num_pages, "a page is leaked"
        leases = Counter(stored for member in self.members for stored in member.leased)
        assert {stored: stored.leases for stored in there if stored.leases} == leases
        assert all(stored.leases and not stored.kept for stored in pages.given_up)
        for stored in {*leases, *(stored for stored in there if stored.whole)}:
            assert stored.whole
            found = b"".join(self.slab[a:b] for a, b in pieces(stored.pages, stored.num_bytes, PAGE))
            assert found == self.true.get(stored, b""), "what somebody may read is not what was put"
        laws_of(policy.policy, policy.entries, policy.jobs)
        assert core.runs.keys() == {(m.run.hello.job, m.run.hello.run) for m in self.members}

    def told_once(self):
        """No sample of an epoch was used twice, or offered twice unless it had changed."""
        seen = defaultdict(set)
        for call in self.core.policy.calls:
            if call[0] in ("begin", "leave"):
                seen[call[1]] = set()
            elif call[0] == "changed":
                seen[call[1]].discard(("offer", call[2]))
            elif call[0] in ("use", "offer"):
                assert call[:3:2] not in seen[call[1]]
                seen[call[1]].add(call[:3:2])


def laws_of(policy, entries, jobs):
    """Check the promises of a policy beyond its capacity."""
    if isinstance(policy, Gain):
        spaces = policy.spaces.values()
        assert policy.pool + sum(space.held + space.idle for space in spaces) == policy.capacity
        assert min(policy.pool, *(space.idle for space in spaces), 0) == 0
        assert all(sum(space.counts.values()) == len(space.following) for space in spaces)
    if isinstance(policy, NextUse):
        assert entries.keys() == policy.uses.keys()
        for entry, use in policy.uses.items():  # nothing stays that nobody will use
            assert use.reader.job.name in jobs or isinstance(use.reader, Expected)
            assert use.reader.next_use(entry[1]) >= 0


KINDS = ["join", "leave", *["begin", "use"] * 2, *["load", "put"] * 3, "offer"]
REQUEST = st.tuples(
    st.sampled_from([*KINDS, "drop", "done", "measured"]),
    st.integers(0, 5),
    st.integers(0, NUM_SAMPLES - 1),
    st.integers(0, 40),
)


EACH = {name: functools.partial(new_policy, name) for name in POLICIES}
EACH |= {f"{name}, keeps": functools.partial(new_policy, name, keep=9.0) for name in ("next_use", "lru")}
EACH_POLICY = pytest.mark.parametrize("policy", EACH.values(), ids=EACH)


def run(policy, requests, num_pages=12):
    world = World(policy, num_pages)
    for request in requests:
        world.do(*request)
        world.hold()
    world.told_once()
    for member in list(world.members):
        world.leave(member, 0, 0)
    world.hold()
    world.now += 10.0  # what is kept for a job to come is gone when somebody looks after that time
    world.do("join", 0, 0, 0)
    world.leave(world.members[0], 0, 0)
    assert world.core.pages.entries == world.core.policy.jobs == {}
    assert not world.core.pages.given_up
    return world


@EACH_POLICY
@given(st.lists(REQUEST, max_size=60), st.integers(0, 12))
def test_any_interleaving_of_requests_holds_the_laws(policy, requests, num_pages):
    run(policy, requests, num_pages)


@EACH_POLICY
def test_thousands_of_requests_in_one_life_hold_the_laws_and_repeat_their_answers(policy):
    drawn = random.Random(0)
    kinds = [kind for kind in KINDS if kind != "leave"]
    kinds += ["load", "load", "load", "put", "put", "drop", "done", "measured"]
    requests = [
        ("leave" if drawn.random() < 0.01 else drawn.choice(kinds), *map(drawn.randrange, (6, 10, 41)))
        for _ in range(3_000)
    ]
    world, again = run(policy, requests), run(policy, requests)
    assert world.core.policy.calls == again.core.policy.calls
    assert [one.entry for one in world.true] == [one.entry for one in again.true]
    least = 150 if policy is Lru else 15
    assert sum(stored.whole for stored in world.true) > least, "too little was stored to say anything"
    assert world.leases > least
