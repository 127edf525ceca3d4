"""The course of a run: every batch in its turn, from wherever the run goes on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.run.course import Course


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
