"""A simulated step: instructions and messages take the seconds they are given, and nothing else does."""

import dataclasses
import itertools

import pytest
from cases import Case, plan_of
from hypothesis import given
from hypothesis import strategies as st
from profiles import layer_of, profile_of, value_of
from programs import on_paper, two_ranks

from penstock import ScheduleError, partition
from penstock.pipeline.run.timeline import Panel
from penstock.pipeline.schedules import SCHEDULES, schedule_named
from penstock.pipeline.schedules.instruction import Op, parse_program, show
from penstock.pipeline.schedules.replicated import (
    dealt,
    live_micro_batches,
    live_versions,
    most_held,
    replicated,
    step_programs,
    without,
)
from penstock.pipeline.schedules.simulate import (
    outline,
    simulate,
    simulate_plan,
    step_seconds,
)
from penstock.pipeline.schedules.verify import smallest_window, verify


def seconds(messages, transfer=0.0, work=None):
    table = work or {Op.F: 1.0, Op.B: 2.0}
    return simulate(messages, work=lambda i: table[i.op], transfer=lambda message: transfer).seconds


def test_two_stages_by_hand():
    # 1f1b   stage 0   F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2         at F = 1, B = 2
    #        stage 1   .. F0 B0 B0 F1 B1 B1 F2 B2 B2
    # gpipe  stage 0   F0 F1 F2 .. B0 B0 B1 B1 B2 B2               B0 arrives at 6
    #        stage 1   .. F0 F1 F2 B0 B0 B1 B1 B2 B2
    assert seconds(two_ranks(3)) == seconds(two_ranks(3, "gpipe")) == 12.0
    assert seconds(two_ranks(1), transfer=0.5) == 1 + 0.5 + 1 + 2 + 0.5 + 2  # everything in turn
    programs = schedule_named("1f1b")([[0, 1]], 2, extra_in_flight=0)
    assert seconds(outline(programs), transfer=100.0) == 12.0  # stages of one rank have no link


def test_a_slow_link_is_the_bottleneck_and_carries_one_message_at_a_time():
    down, up = 1 + 8 * 10, 8 * 10
    assert seconds(two_ranks(8, "gpipe"), transfer=10.0) == down + 1 + 2 + up + 2
    plain, extra = (seconds(two_ranks(16, extra_in_flight=n), transfer=2.0) for n in (0, 1))
    assert 16 * 3.0 <= extra < 0.8 * plain  # one more in flight hides a transfer


def rows(simulation):
    """``name@start+waiting-end`` of every span."""
    return [f"{s.name}@{s.start:g}+{s.waiting:g}-{s.end:g}" for s in simulation.spans]


def test_the_spans_say_when_each_instruction_waited_and_ran():
    made = on_paper("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", transfer=0.5)
    assert rows(made) == [
        "0F0@0+0-1", "0F1@1+0-2", "0B0@2+3-7", "0B1@7+1-10",
        "1F0@0+1.5-2.5", "1B0@2.5+0-4.5", "1F1@4.5+0-5.5", "1B1@5.5+0-7.5",
    ]  # fmt: skip
    assert Panel(title="", spans=made.spans).bubble == [1 - 6 / 10, 1 - 6 / 10]


# stage 0   F0 F1 .. I0 W0 F2 I1 W1 I2 W2
# stage 1   .. F0 I0 F1 I1 W0 F2 I2 W1 W2
def test_a_gradient_leaves_after_its_first_half():
    lines = "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"
    made = on_paper(*lines)
    assert made.seconds == 10.0
    assert Panel(title="", spans=made.spans).bubble == pytest.approx([0.1, 0.1])
    assert live_micro_batches(list(map(parse_program, lines))) == (2, 2)  # what W needs stays until W


def test_an_update_takes_its_time_where_it_stands():
    made = on_paper("0F0 0B0 0U 0F1 0B1 0U", U=10.0)
    assert rows(made)[2:4] == ["0U@3+0-13", "0F1@13+0-14"]


# stage 0   F0 F1 .. B0 F2 B1 F3 B2 .. B3   every B is followed by U
# stage 1   .. F0 B0 F1 B1 F2 B2 F3 B3
STREAM = ("0F0 0F1 0B0 0U 0F2 0B1 0U 0F3 0B2 0U 0B3 0U", "1F0 1B0 1U 1F1 1B1 1U 1F2 1B2 1U 1F3 1B3 1U")


def test_versions_live_as_long_as_a_backward_needs_them():
    programs = [parse_program(line) for line in STREAM]
    for weights, versions in (("stashed", (2, 1)), ("vertical_sync", (2, 2)), ("latest", (1, 1))):
        assert live_versions(programs, weights=weights) == versions
    assert live_versions([parse_program("0F0 0F1 0B0 0U 0B1 0U")]) == (2,)  # the newest, that nobody reads
    line = "0F0 0F1 0F2 0B0 0F3 0B1 0U 0F4 0B2 0F5 0B3 0U 0F6 0B4 0F7 0B5 0U 0B6 0B7 0U"
    assert live_versions([parse_program(line)], weights="double_buffered", micro_batches=2) == (2,)


def test_a_part_of_a_stream_has_what_came_before_it():
    lines = "0B0 0U 0F2 0B1 0U", "1F1 1B1 1U 1F2 1B2 1U"
    made = on_paper(*lines)
    assert live_micro_batches(list(map(parse_program, lines))) == (2, 1)
    assert rows(made)[:2] == ["0B0@0+0-2", "0U@2+0-2"]


def test_programs_that_wait_for_each_other_are_refused():
    with pytest.raises(ScheduleError, match=r"found rank 0 at 0B0, rank 1 at 1F1; reorder"):
        on_paper("0F0 0B0 0F1 0B1", "1F1 1B0 1F0 1B1")


def test_bytes_that_wait_on_a_rank_are_those_of_all_its_stages_at_once():
    programs = [parse_program("0F0 0F1 1F0 0B0 1F1 1B0 1B1 0B1")]
    assert most_held(programs, lambda stage, number: (10, 1)[stage] * number) == (21,)
    assert most_held(programs, lambda stage, number: 100 + (10, 1)[stage] * min(number, 1)) == (211,)


@given(schedule=st.sampled_from(["gpipe", "1f1b"]), number=st.integers(1, 9), transfer=st.floats(0, 9))
def test_the_seconds_alone_are_those_of_the_spans(schedule, number, transfer):
    made = two_ranks(number, schedule)
    asked = {"work": lambda i: 1.0 + i.stage, "transfer": lambda message: transfer}
    assert step_seconds(made, **asked) == simulate(made, **asked).seconds


NET_OF_TWO = profile_of(
    [layer_of("a", forward=3, backward=5, size=8), layer_of("b", forward=2, backward=6)],
    [value_of(0, [1], num_bytes=1000)],
)


def test_a_plan_is_simulated_with_its_own_seconds_and_link():
    plan = partition(NET_OF_TWO, cuts=["a"], micro_batches=1, link=8_000_000)  # 1 MB/s: 1 ms a tensor
    programs = [parse_program("0F0 0B0"), parse_program("1F0 1B0")]
    made = simulate_plan(plan, programs)
    assert [span.end for span in made.spans] == pytest.approx([3e-3, 18e-3, 6e-3, 12e-3])
    free = simulate_plan(dataclasses.replace(plan, link=None), programs)
    assert free.seconds == pytest.approx(16e-3)


def test_an_update_takes_its_seconds_at_the_end_and_weighs_on_the_cut():
    layers = [
        layer_of(name, forward=4, backward=8, size=size)
        for name, size in zip("abcd", (4, 4, 4, 4000), strict=True)
    ]
    profile = profile_of(layers)
    even = partition(profile, stages=2, micro_batches=2)
    assert [len(stage.layers) for stage in even.stages] == [2, 2]
    slow = partition(profile, stages=2, micro_batches=2, update_seconds=8e-6)  # 32 ms for d: 16 a micro-batch
    assert [len(stage.layers) for stage in slow.stages] == [3, 1]
    assert [stage.update_seconds for stage in slow.stages] == pytest.approx([96e-6, 32e-3])
    made = simulate_plan(slow, step_programs(slow))
    last = [span for span in made.spans if span.stage == 1][-1]
    assert (last.op, last.computing) == ("U", pytest.approx(32e-3))


def test_half_a_backward_takes_half_its_time():
    plan = partition(NET_OF_TWO, cuts=["a"], micro_batches=1)
    programs = [parse_program("0F0 0I0 0W0 0U"), parse_program("1F0 1I0 1W0 1U")]
    seconds = [span.computing for span in simulate_plan(plan, programs).spans]
    assert seconds == pytest.approx([3e-3, 2.5e-3, 2.5e-3, 0, 2e-3, 3e-3, 3e-3, 0])


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
