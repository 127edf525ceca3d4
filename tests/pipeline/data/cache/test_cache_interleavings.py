"""Random interleavings of all that connections may say, held against a model: bytes, pages, capacity."""

import random
from array import array
from collections import Counter, defaultdict
from typing import Any

import pytest
from brokers import hello
from hypothesis import given
from hypothesis import strategies as st
from small_policies import Watched

from penstock.pipeline.data.cache.core import Core, Pages
from penstock.pipeline.data.cache.gain import Gain
from penstock.pipeline.data.cache.next_use import NextUse
from penstock.pipeline.data.cache.policies import POLICIES, Lru
from penstock.pipeline.data.cache.policy import Times
from penstock.pipeline.data.cache.wire import pieces

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
        self.core.policy.calls.append(("changed", member.run.name, index))

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
        assert len(out) + pages.num_free == self.num_pages, "a page is leaked"
        assert pages.num_bytes == sum(stored.num_bytes for stored in pages.entries.values())
        leases = Counter(stored for member in self.members for stored in member.leased)
        assert {stored: stored.leases for stored in there if stored.leases} == leases
        assert all(stored.leases and not stored.kept for stored in pages.given_up)
        for stored in {*leases, *(stored for stored in there if stored.whole)}:
            assert stored.whole
            found = b"".join(self.slab[a:b] for a, b in pieces(stored.pages, stored.num_bytes, PAGE))
            assert found == self.true.get(stored, b""), "what somebody may read is not what was put"
        laws_of(policy.policy, policy.entries, policy.jobs)
        assert core.runs.keys() == {member.run.key for member in self.members}

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
            assert use.reader.job.name in jobs
            assert use.reader.next_use(entry[1]) >= 0


KINDS = ["join", "leave", *["begin", "use"] * 2, *["load", "put"] * 3, "offer"]
REQUEST = st.tuples(
    st.sampled_from([*KINDS, "drop", "done", "measured"]),
    st.integers(0, 5),
    st.integers(0, NUM_SAMPLES - 1),
    st.integers(0, 40),
)


EACH_POLICY = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def run(policy, requests, num_pages=12):
    world = World(policy, num_pages)
    for request in requests:
        world.do(*request)
        world.hold()
    world.told_once()
    for member in list(world.members):
        world.leave(member, 0, 0)
    world.hold()
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
