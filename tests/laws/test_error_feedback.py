"""Error feedback of ``double_buffered``: the bits of the replay with any optimizer, on any ranks."""

import pytest
from streams import StreamCase, differences

RUNS = [(name, resume) for name in ("muon", "adamw", "sgd") for resume in ("", "same", "state")]


def case(optimizer, resume, **more):
    policy = {"schedule": "1f1b", "weights": "double_buffered", "error_feedback": True}
    return StreamCase(
        model="gated", cuts=2, optimizer=optimizer, clip=0.5, steps=4, resume=resume, **policy, **more
    )


@pytest.mark.parametrize(("optimizer", "resume"), RUNS)
def test_in_one_process(optimizer, resume):
    assert differences(case(optimizer, resume)) == []


@pytest.mark.parametrize(("optimizer", "resume"), RUNS[::4])
def test_on_two_ranks(optimizer, resume, ranks):
    assert differences(case(optimizer, resume, world="processes"), ranks) == []
