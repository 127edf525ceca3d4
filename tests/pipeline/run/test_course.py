"""The course of a run: every batch in its turn, from wherever the run goes on."""

import contextlib
import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock
from penstock.conf.schema import TrainConfig
from penstock.pipeline.data.digits import load
from penstock.pipeline.run.training_loop import Course, course, loader


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3), st.integers(1, 25))
def test_it_is_the_rest_of_the_whole_course_from_every_step_on(epochs, length, tests, most):
    steps = min(epochs * length, most)
    options = {"epochs": epochs, "steps": steps, "steps_of_an_epoch": length, "tests": tests}
    whole = list(Course(**options))
    trained = [place for place in whole if place.split == "train"]
    assert [place.epoch * length + place.number for place in trained] == list(range(steps))
    tested = [place.number for place in whole if place.split == "test"]
    assert tested == [*range(tests)] * -(-steps // length)
    for done in range(steps + 1):
        rest = list(Course(**options, done=done))
        assert rest == whole[len(whole) - len(rest) :]
        assert sum(place.split == "train" for place in rest) == steps - done
        assert sum(place.split == "test" for place in rest) >= tests  # of the epoch that ended with it, too


def test_a_course_may_be_gone_through_twice():
    course = Course(epochs=2, steps=3, steps_of_an_epoch=2, tests=1)
    assert list(course) == list(course)


@pytest.mark.parametrize(
    ("shares", "follows"), [([1, 1, 1], None), ([2, 1, 1], None), ([3, 1, 0], None), ([1, 1, 1], "measured")]
)
def test_each_replica_reads_its_own_micro_batches_where_it_knows_ahead_which(shares, follows, tmp_path):
    samples, config = load(size=8, channels=1), TrainConfig(batch_size=40, micro_batches=4)
    x = torch.zeros(40, 1, 8, 8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    profile = penstock.measure(penstock.trace(model, (x[:10],)), (x[:10],), repeats=1)
    plan = penstock.partition(profile, stages=1, replicas=3, shares=shares, micro_batches=4, codec="raw")
    models = [copy.deepcopy(model) for _ in range(3)]

    def train(world):
        sgd = {"loss": nn.functional.cross_entropy, "optimizer": torch.optim.SGD}
        pipe = penstock.Pipeline(models[world.rank], plan, **sgd, world=world, shares=follows)
        ahead = course(config, samples, done=0)
        with contextlib.closing(loader(config, samples, pipe, ahead, folder=tmp_path, tell=print)) as loads:
            batch, _ = loads.take(next(iter(ahead)))
            return pipe.reads_tests(), batch

    found = penstock.in_threads(train, ranks=3)
    assert [tests for tests, _ in found] == [True, False, False]
    if follows:
        assert all(isinstance(batch, torch.Tensor) and not batch.is_meta for _, batch in found)
        return
    for m in range(4):
        has = [rank for rank, (_, batch) in enumerate(found) if not batch.micro_batches[m].is_meta]
        assert has == [plan.rank_of(0, m)]
