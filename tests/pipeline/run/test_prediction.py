"""A step as the plan predicts it, beside the steps that were measured, and the term that was off."""

import dataclasses

import pytest
from profiles import layer_of, profile_of, value_of
from reports import report

from penstock import partition
from penstock.pipeline.run import tables
from penstock.pipeline.run.metrics import Totals
from penstock.pipeline.run.prediction import compare
from penstock.pipeline.run.schedule_comparison import simulated

# A micro-batch takes 3 ms in each of two stages, and 1000 bytes pass a cut in 1 ms each way.
LAYERS = [layer_of(name, size=4) for name in "ab"]
PLAN = partition(
    profile_of(LAYERS, [value_of(0, [1])]), cuts=["a"], micro_batches=2, link=8_000_000, schedule="gpipe"
)
PANEL = simulated(PLAN)[1]
MEASURED = {"rates": {(0, 1): 500_000.0, (1, 0): 250_000.0}}
STEP = 0.011  # a forward, a link, two forwards, a backward, a link, two backwards of 2 ms


def found(
    *, seconds, worked=(0.006, 0.006), computed=None, waited=(0.0, 0.0), slow=9.0, steps=3, plan=PLAN, **rates
):
    """The comparison of a run of several steps, the first of which takes ``slow``."""
    stages = tuple(
        dataclasses.replace(one, worked_seconds=work, compute_seconds=total, waiting_seconds=wait)
        for one, work, total, wait in zip(report().stages, worked, computed or worked, waited, strict=True)
    )
    first = dataclasses.replace(report(seconds=slow), stages=tuple(
        dataclasses.replace(one, worked_seconds=slow, forward_sent=999) for one in stages
    ))  # fmt: skip
    totals = Totals(num_stages=2)
    for one in (first, *[dataclasses.replace(report(1, seconds=seconds), stages=stages)] * steps):
        totals.add(one)
    told = compare(plan, PANEL, totals, **(rates or MEASURED))
    assert told is not None
    return told


def test_every_term_of_a_stage_is_told_as_planned_and_as_measured_after_the_first_step():
    told = found(seconds=STEP, worked=(0.006, 0.007), waited=(0.003, 0.001))
    assert told["step_seconds"] == pytest.approx([STEP, STEP])
    first, last = told["stages"]
    assert first["compute"] == pytest.approx([0.006, 0.006])
    assert last["compute"] == pytest.approx([0.006, 0.007])
    assert first["transfer"] == pytest.approx([0.002, 40 / 500_000])
    assert last["transfer"] == pytest.approx([0.002, 60 / 250_000])
    assert [one["waiting"][1] for one in (first, last)] == pytest.approx([0.003, 0.001])
    assert first["waiting"][0] > 0 == told["stages"][1]["transfer"].count(None)
    assert told["off"] is None


def test_who_has_not_measured_the_links_and_a_run_without_steps_say_so():
    assert [one["transfer"][1] for one in found(seconds=STEP, rates=None)["stages"]] == [None, None]
    assert compare(PLAN, PANEL, Totals(num_stages=2), rates=None) is None


OFF = [
    ({"seconds": 1.1 * STEP, "worked": (0.006, 0.0073)}, None),
    (
        {"seconds": 2 * STEP, "worked": (0.006, 0.018)},
        "100% more than the plan predicts (11 ms): stage 1 computed and packed for 18 ms instead of 6 ms",
    ),
    (
        {"seconds": STEP / 2, "worked": (0.001, 0.006)},
        "50% less than the plan predicts (11 ms): stage 0 computed and packed for 1 ms instead of 6 ms",
    ),
    ({"seconds": 2 * STEP, "computed": (0.015, 0.006)}, "an update took 9 ms, which the plan does not count"),
    ({"seconds": 2 * STEP, "waited": (0.02, 0.01)}, "stages waited 30 ms for frames instead of"),
    ({"seconds": 2 * STEP, "worked": (0.008, 0.008)}, "waiting are each less than half of that"),
]


@pytest.mark.parametrize(("measured", "why"), OFF)
def test_a_step_that_is_off_by_more_than_15_per_cent_names_the_term(measured, why):
    off = found(**measured)["off"]
    assert off is None if why is None else why in off


def test_stages_of_one_rank_are_off_together():
    alone = dataclasses.replace(
        PLAN, stages=tuple(dataclasses.replace(stage, ranks=(0,)) for stage in PLAN.stages)
    )
    off = found(plan=alone, seconds=3 * STEP, worked=(0.016, 0.016))["off"]
    assert off.endswith(": stages 0, 1 computed and packed for 32 ms instead of 12 ms")


def test_a_resumed_run_is_measured_anew():
    totals, resumed = Totals(num_stages=2), Totals(num_stages=2)
    for _ in range(4):
        totals.add(report(seconds=9.0))
    resumed.load(totals.kept())
    for seconds in (5.0, 2.0, 2.0):  # the first step of a process is slow
        resumed.add(report(seconds=seconds))
    told = compare(PLAN, PANEL, resumed, rates=None)
    assert told is not None
    assert told["step_seconds"][1] == 2.0


def test_a_slow_step_among_many_does_not_hide_how_long_one_takes():
    totals = Totals(num_stages=2)
    for step, seconds in enumerate((9.0, 5.0, *[STEP] * 4)):  # codecs are tried in the second
        totals.add(report(step, seconds=seconds))
    told = compare(PLAN, PANEL, totals, rates=None)
    assert told is not None
    assert told["step_seconds"] == pytest.approx([STEP, STEP])


def test_of_few_steps_nothing_is_said_to_be_off():
    assert found(seconds=2 * STEP, steps=2)["off"] is None


def test_the_table_shows_what_is_not_known_as_a_dash_and_errors_where_there_is_room():
    told = found(seconds=STEP, rates=None)
    pairs = enumerate((2048, 0))
    stages = [{"stage": n, "predicted_bytes": 1024, "peak_bytes": measured} for n, measured in pairs]
    for wide, cells in [
        (True, (["6 ms -> 6 ms (+0%)"] * 2, ["2 ms -> -"] * 2, ["1 KiB -> 2 KiB (2x)", "1 KiB -> -"])),
        (False, (["6 ms->6 ms"] * 2, ["2 ms->-"] * 2, ["1 KiB->2 KiB", "1 KiB->-"])),
    ]:
        drawn = tables.prediction_table({"stages": stages, "prediction": told}, wide=wide)
        assert drawn is not None
        columns = [[*map(str, column.cells)] for column in drawn.columns]
        assert (columns[1], columns[2], columns[4]) == cells
    assert tables.prediction_table({"stages": stages, "prediction": None}) is None
