"""Writes of a forward that leave the example's bits as they are: a teacher of equal weights, a rare event."""

import copy

import pytest
import torch
from small_pipelines import batch, built, differences, pipeline_of, profile_of
from torch import nn

import penstock
from penstock.pipeline.runtime.replicas import check_replicated


class Teacher(nn.Module):
    """The student's weights, copied and followed; ``graded`` inputs of it have gradients."""

    def __init__(self, graded):
        super().__init__()
        self.first, self.student = nn.Linear(6, 6), nn.Linear(6, 3)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.graded = graded

    def forward(self, x):
        x = self.first(x).tanh()
        with torch.no_grad():
            for theirs, ours in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                theirs.lerp_(ours, 0.5)
        return self.student(x) + self.teacher(x if self.graded else x.detach())


class Rare(nn.Module):
    """Counts elements that no example has, and adds the count."""

    def __init__(self):
        super().__init__()
        self.first, self.end = nn.Linear(6, 6), nn.Linear(6, 3)
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.seen.add_((x > 1.5).sum())
        return self.end(self.first(x) + self.seen)


RARE = torch.cat([batch(3)[0].clamp(max=1), batch(6)[0] * 3]), batch(9)[1]
FORWARDS = {
    "teacher": (lambda: Teacher(graded=False), None),
    "graded teacher": (lambda: Teacher(graded=True), None),
    "rare": (Rare, RARE),
}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("name", FORWARDS)
def test_bits_are_those_of_the_plain_loop(name, schedule):
    make, data = FORWARDS[name]
    assert differences(make, data=data, schedule=schedule) == []


@pytest.mark.parametrize("name", FORWARDS)
def test_what_would_write_twice_or_apart_is_refused(name):
    make, data = FORWARDS[name]
    example = None if data is None else (data[0][:3],)
    written = "seen" if name == "rare" else "teacher.weight"
    if name != "rare":  # a buffer is put back before a forward runs again
        with pytest.raises(penstock.PlanError, match=f"a forward writes to {written}"):
            pipeline_of(built(make), example=example, stages=2, recompute=True)
    model = built(make)
    profile = profile_of(model, example)
    plan = penstock.partition(profile, replicas=[2], exact=True, micro_batches=4)
    with pytest.raises(penstock.PlanError, match=f"a forward writes to .*{written.partition('.')[0]}"):
        check_replicated(plan, model, profile.graph)


def test_a_trained_weight_that_is_only_held_to_its_range_is_refused():
    class Clipped(nn.Sequential):
        def forward(self, input):
            with torch.no_grad():
                next(self.parameters()).clamp_(-9, 9)
            return super().forward(input)

    model = Clipped(nn.Linear(6, 3))
    with pytest.raises(penstock.PlanError, match=r"it writes to 0\.weight in forward of Clipped"):
        penstock.trace(model, (batch(3)[0],))
