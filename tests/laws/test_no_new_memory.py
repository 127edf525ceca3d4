"""After its second step a pipeline makes no buffer for frames: it lends out what it has."""

from typing import Any

import pytest
from cases import Case, on_ranks, pipeline_of, plan_of
from zoo import build

import penstock
from penstock.compression.buffers import Pool

CASES = [
    Case(model="mlp", cuts=3, steps=6),
    Case(model="mlp", cuts=3, schedule="gpipe", steps=6),
    Case(model="mlp", cuts=4, ranks=2, schedule="interleaved", steps=6),
    Case(model="gated", cuts=3, schedule="zb_h1", steps=6),
    Case(model="mlp", cuts=3, tier="packed", codec="raw", steps=6),
]


def made(case, plan):
    """Numbers that each step allocated, of slots lent, and of other buffers lent from the third step on."""
    model, batches = build(case.model, case.dtype, case.steps)
    counts, new = [0] * case.steps, Pool._new
    with pytest.MonkeyPatch.context() as patch:

        def counted(pool, size):
            counts[step] += 1
            return new(pool, size)

        patch.setattr(Pool, "_new", counted)
        pipe = pipeline_of(case, plan, model)
        pool: Any = pipe.engine.frames.transport.pool
        slots, others = pool.slots, 0
        for step, (x, y) in enumerate(batches):
            pipe.step(x, y)
            if step == 1:
                others = slots.num_allocated
    return counts, slots.num_fetched, slots.num_allocated - others


@pytest.mark.parametrize("case", CASES, ids=str)
def test_from_the_third_step_on_no_buffer_is_made(case):
    plan, _ = plan_of(case)
    counts, planned, deviating = made(case, plan)
    assert counts[0] > 1
    assert counts[2:] == [0] * 4
    assert planned >= 5
    assert deviating == 0


def on_a_rank(case, plan_path, random_layers):
    counts, planned, deviating = made(case, penstock.Plan.load(plan_path))
    right = counts[2:] == [0] * 4 and planned >= 5 and deviating == 0
    return [] if right else [f"made {counts}, planned {planned}, deviating {deviating}"]


@pytest.mark.parametrize(
    "schedule", ["1f1b", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpipe", "interleaved"))]
)
def test_ranks_make_none_either(ranks, tmp_path, schedule):
    case = Case(model="mlp", cuts=4, ranks=2, schedule=schedule, steps=6)
    assert on_ranks(ranks, on_a_rank, case, tmp_path) == []


def test_a_codec_that_is_chosen_by_measuring_makes_none_once_it_is_chosen():
    case = Case(model="mlp", cuts=3, codec="auto", steps=20)
    plan, _ = plan_of(case)
    counts, *_ = made(case, plan)
    assert counts[14:] == [0] * 6
