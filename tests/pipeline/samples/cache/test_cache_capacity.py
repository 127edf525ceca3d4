"""Whatever jobs do, in whatever order: no policy keeps more than its capacity, nor says what is not so."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kept import Kept

from penstock.pipeline.samples.cache.gain import Gain
from penstock.pipeline.samples.cache.next_use import NextUse
from penstock.pipeline.samples.cache.policies import POLICIES
from penstock.pipeline.samples.cache.policy import Job, Times
from penstock.scripts.bench.cache_sides import CONTESTANTS

DEFAULT = ("next_use", "gain", "lru")
NUM = 6
DO = ("join", "measured", "leave", "begin", "last", "step", "step", "step", "step", "wild", "drop", "half")
DOINGS = st.lists(st.tuples(st.sampled_from(DO), st.integers(0, 3), st.integers(0, 40)), max_size=80)


def each(names: Iterable[str]) -> pytest.MarkDecorator:
    """One test for each policy; slow: variants of them, and what they are compared with."""
    marks = [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name", marks)


class Jobs:
    """Four jobs on two data sets, that come, go and read as they are told."""

    def __init__(self, kept: Kept, drawn: random.Random) -> None:
        self.kept, self.drawn, self.now = kept, drawn, 0.0
        self.left: dict[str, list[int]] = {}  # of the order of this epoch
        self.answers: list[Any] = []

    def do(self, what: str, number: int, value: int) -> None:
        name, self.now = f"job{number}", self.now + value / 10
        if what in ("join", "measured"):
            self.kept.join(self.job(name, number, value if what == "measured" else None), self.now)
            self.left.setdefault(name, [])
        elif what == "drop" and self.kept.there:
            self.kept.drop(sorted(self.kept.there)[value % len(self.kept.there)])
        elif name not in self.left:
            return
        elif what == "leave":
            self.answers.append(self.kept.leave(name, self.now))
            del self.left[name]
        elif what in ("begin", "last", "half"):
            self.begin(name, what)
        elif what == "wild":
            self.read(name, value % NUM, value)
        elif self.left[name]:
            self.read(name, self.left[name].pop(0), value)
        else:
            self.begin(name, "begin")

    def job(self, name: str, number: int, value: int | None) -> Job:
        told: Times | None = None
        if value is not None:
            times = {"batch_io": 2.0, "sample_io": 1.0, "augmentation": 0.0, "training": 1.0}
            told = Times(epoch=1.0 + value, hidden=value % 3, **times)
        return Job(name=name, data=f"data{number % 2}", num_samples=NUM, batch_size=2, times=told)

    def begin(self, name: str, what: str) -> None:
        order, following = self.order(), None if what == "last" else self.order()
        if what == "half":
            order = order[: NUM // 2]
        foretold = getattr(self, f"_{name}", None)
        order = order if foretold is None or what == "half" else foretold
        setattr(self, f"_{name}", following)
        self.left[name] = list(order)
        self.answers.append(self.kept.begin(name, order, following, self.now))

    def order(self) -> list[int]:
        return self.drawn.sample(range(NUM), NUM)

    def read(self, name: str, index: int, num_bytes: int) -> None:
        found = self.kept.use(name, index, self.now)
        self.answers.append(found)
        if found.entry is None and num_bytes % 7:  # some are not offered, as where a load failed
            self.answers.append(self.kept.offer(name, index, num_bytes - 2, self.now))  # sizes may lie


@each(CONTESTANTS)
@given(doings=DOINGS, capacity=st.integers(0, 90), seed=st.integers(0, 9))
def test_never_more_than_the_capacity(
    name: str, doings: list[tuple[str, int, int]], capacity: int, seed: int
):
    policy = CONTESTANTS[name](capacity)
    jobs = Jobs(Kept(policy), random.Random(seed))
    for doing in doings:
        jobs.do(*doing)
        if isinstance(policy, Gain):
            spaces = policy.spaces.values()
            assert policy.pool + sum(space.held + space.idle for space in spaces) == capacity
            assert min(policy.pool, *(space.idle for space in spaces), 0) == 0
            assert all(sum(space.counts.values()) == len(space.following) for space in spaces)
        if isinstance(policy, NextUse):
            for entry in jobs.kept.there:  # nothing stays that nobody will use
                user = policy._laid.user(entry)
                assert user.job.name in jobs.left
                assert user.next_use(entry[1]) >= 0
    for name in list(jobs.left):
        jobs.kept.leave(name, jobs.now)
    assert jobs.kept.there == {}


@each(POLICIES)
@given(doings=DOINGS, seed=st.integers(0, 9))
def test_a_policy_repeats_its_answers(name: str, doings: list[tuple[str, int, int]], seed: int):
    said = []
    for _ in range(2):
        jobs = Jobs(Kept(POLICIES[name](50)), random.Random(seed))
        for doing in doings:
            jobs.do(*doing)
        said.append(jobs.answers)
    assert said[0] == said[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTESTANTS)
def test_never_more_than_the_capacity_in_a_long_run(name: str):
    drawn = random.Random(name)
    for capacity in (0, 13, 60, 10_000):
        jobs = Jobs(Kept(CONTESTANTS[name](capacity)), drawn)
        for _ in range(20_000):
            jobs.do(drawn.choice(DO), drawn.randrange(4), drawn.randrange(41))
