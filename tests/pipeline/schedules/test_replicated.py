"""Programs of stages with replicas: literals, every shape is legal, what live and simulate say of them."""

import itertools

import pytest
from cases import Case, plan_of

from penstock.compression.errors import ScheduleError
from penstock.pipeline.schedules import SCHEDULES
from penstock.pipeline.schedules.instruction import parse_program, show
from penstock.pipeline.schedules.replicated import dealt, live_micro_batches, replicated, without
from penstock.pipeline.schedules.verify import smallest_window, verify


def programs_of(schedule, replicas, micro_batches, extra=0):
    made = replicated(SCHEDULES[schedule], dealt(replicas), deepens=schedule == "1f1b")
    stages = [[stage] for stage, number in enumerate(replicas) for _ in range(number)]
    return made(stages, micro_batches, extra_in_flight=extra)


def rank_of(replicas):
    ranks = dealt(replicas)
    return lambda stage, micro_batch: ranks[stage][micro_batch % len(ranks[stage])]


def test_literals_of_two_replicas_before_one():
    assert [show(program) for program in programs_of("1f1b", [2, 1], 4)] == [
        "0F0 0F2 0B0 0B2",
        "0F1 0F3 0B1 0B3",
        "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ]
    assert [show(program) for program in programs_of("gpipe", [1, 2], 3)] == [
        "0F0 0F1 0F2 0B0 0B1 0B2",
        "1F0 1F2 1B0 1B2",
        "1F1 1B1",
    ]


def test_a_lost_replica_leaves_the_others_with_their_shares():
    plan, _ = plan_of(Case(model="mlp", cuts=2, replicas=[3, 1], micro_batches=6))
    plan = plan.with_shares(((1, 2, 3), (1,)))
    left = without(plan, 1)
    assert left is not None
    assert [(stage.ranks, stage.shares) for stage in left.stages] == [((0, 1), (1, 3)), ((2,), ())]
    again = without(left, 0)
    assert again is not None
    assert [(stage.ranks, stage.shares) for stage in again.stages] == [((0,), ()), ((1,), ())]
    assert without(again, 0) is None
    assert without(plan, 3) is None
    assert without(plan, None) is None


def test_pairs_of_replicas_are_pipelines_of_their_own():
    half = SCHEDULES["1f1b"]([[0], [1]], 4, extra_in_flight=1)
    doubled = programs_of("1f1b", [2, 2], 8, extra=1)
    renumbered = [[i._replace(micro_batch=(i.micro_batch or 0) // 2) for i in own] for own in doubled]
    assert renumbered[::2] == renumbered[1::2] == half


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_every_shape_is_legal_with_skips_too(schedule):
    for replicas in [*itertools.product([1, 2, 3], repeat=3), (1, 4, 1), (4, 1), (5,)]:
        stages = range(len(replicas))
        edges = [(a, b) for a in stages for b in stages if a < b]
        for number in (max(replicas), 7):
            made = programs_of(schedule, replicas, number)
            given = {"num_micro_batches": number, "edges": edges, "rank_of": rank_of(replicas)}
            window = smallest_window(made, **given)
            order = verify(made, **given, window=window)
            assert len(order) == 2 * number * len(replicas)


def test_a_micro_batch_on_the_wrong_replica_is_refused():
    made = [parse_program(text) for text in ("0F1 0B1", "0F0 0B0")]
    with pytest.raises(ScheduleError, match="micro-batch 1 of stage 0 is dealt to rank 1"):
        verify(made, num_micro_batches=2, edges=[], rank_of=rank_of([2]))


def test_in_flight_is_that_of_the_fullest_replica():
    assert live_micro_batches(programs_of("1f1b", [2, 1], 8)) == (2, 1)
    assert live_micro_batches(programs_of("gpipe", [2, 1], 7)) == (4, 7)
