"""Lines and totals of the steps."""

import dataclasses
import json

import pytest
from reports import PLAN, report

from penstock.pipeline.run.logs import JsonLog
from penstock.pipeline.run.metrics import Totals, step_line, summarise
from penstock.pipeline.runtime.report import StageReport


def test_a_line_holds_what_the_step_did_in_both_directions():
    assert step_line(report(3)) == {
        "step": 3,
        "loss": 1.5,
        "seconds": 0.5,
        "samples_per_second": 16.0,
        "bytes_raw": 180,
        "bytes_sent": 100,
        "bubble": pytest.approx(0.4),
        "peak_bytes": 5120,
        "bytes_raw_forward": 100,
        "bytes_raw_backward": 80,
        "bytes_sent_forward": 40,
        "bytes_sent_backward": 60,
    }


def test_the_file_has_a_line_a_step_as_soon_as_the_step_is_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonLog(path) as metrics:
        for step in range(3):
            metrics.append(step_line(report(step)))
            written = path.read_text().splitlines()
            assert [json.loads(line)["step"] for line in written] == list(range(step + 1))


def test_a_loss_that_is_no_number_is_null_since_json_has_no_word_for_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonLog(path) as metrics:
        metrics.append(step_line(report(loss=float("nan"))))
    assert '"loss": null' in path.read_text()


def summary_of(*reports):
    totals = Totals(num_stages=2)
    for one in reports:
        totals.add(one)
    sizes = {"a.weight": 5, "b.weight": 6, "c.weight": 7}
    return summarise(totals, PLAN, sizes=sizes, test={"accuracy": 0.5}, ranks=2)


def test_the_summary_adds_up_the_steps():
    summary = summary_of(report(0, loss=2.0), report(1, loss=1.0))
    assert (summary["test_accuracy"], summary["loss"], summary["ranks"]) == (0.5, 1.0, 2)
    assert (summary["steps"], summary["samples"], summary["seconds"]) == (2, 16, 1.0)
    assert summary["samples_per_second"] == 16.0
    assert (summary["bytes_raw"], summary["bytes_sent"], summary["ratio"]) == (360, 200, 1.8)
    first, last = summary["stages"]
    names = ("layers", "first_layer", "last_layer", "parameters")
    assert [first[name] for name in names] == [2, "a", "b", 11]
    assert (first["bytes_sent_forward"], first["ratio_forward"], first["ratio_backward"]) == (80, 2.5, None)
    assert (last["rank"], last["bytes_raw_backward"], last["parameters"]) == (1, 160, 7)
    assert (last["compute_seconds"], last["waiting_seconds"]) == (0.4, 0.5)


def test_the_bubble_is_that_of_the_steps_after_the_first():
    slow, steady = report(0, seconds=10.0), report(1, seconds=0.5)
    alone = summary_of(slow)
    assert [stage["bubble"] for stage in alone["stages"]] == pytest.approx([0.96, 0.98])
    summary = summary_of(slow, steady, steady)
    assert [stage["bubble"] for stage in summary["stages"]] == pytest.approx([0.2, 0.6])
    assert summary["bubble"] == pytest.approx(0.4)


def test_memory_is_what_a_stage_held_at_most():
    stages = report().stages
    more = dataclasses.replace(stages[0], peak_bytes=7000, live_versions=2, live_micro_batches=4)
    first, last = summary_of(report(), dataclasses.replace(report(1), stages=(more, stages[1])))["stages"]
    names = ("live_micro_batches", "live_versions", "versions_bytes", "peak_bytes", "resident_bytes")
    assert [first[name] for name in names] == [4, 3, 2048, 7000, 9 * 1024]
    assert [last[name] for name in names] == [1, 1, 0, 3072, 8 * 1024]


def test_the_first_step_foretells_what_tiers_hold_and_the_later_ones_hold_it():
    def held(step, device, host, disk, peak):
        tiers = {"device_tier": device, "host_tier": host, "disk_tier": disk, "peak_bytes": peak}
        more = dataclasses.replace(report().stages[0], **tiers, grew_bytes=5 * (step == 0))
        return dataclasses.replace(report(step), stages=(more, report().stages[1]))

    def rows(*reports):
        names = ("rank", "tier", "predicted_peak_bytes", "peak_bytes")
        return [tuple(row[name] for name in names) for row in summary_of(*reports)["tiers"]]

    steps = held(0, 90, 40, 50, 9000), held(1, 70, 0, 30, 100), held(2, 80, 0, 20, 200)
    assert rows(steps[0]) == [(0, "device", 95, 90), (0, "host", 40, 40), (0, "disk", 50, 50)]
    assert rows(*steps[:2]) == [(0, "device", 95, 70), (0, "disk", 50, 30)]
    assert rows(*steps) == [(0, "device", 95, 80), (0, "disk", 50, 30)]
    assert summary_of(*steps)["stages"][0]["peak_bytes"] == 9000


def test_stages_of_one_process_share_its_bubble_and_add_up_their_memory():
    together = dataclasses.replace(
        report(seconds=1.0), stages=tuple(dataclasses.replace(s, rank=0) for s in report().stages)
    )
    assert together.bubble == pytest.approx(0.4)
    assert together.peak_bytes == 8192
    assert report().peak_bytes == 5120
    assert report(seconds=0.3).bubble == 0.0  # a clock that is read late makes none below zero
    assert [stage["bubble"] for stage in summary_of(together)["stages"]] == pytest.approx([0.4, 0.4])


def test_a_stage_report_travels_as_numbers():
    for stage in report().stages:
        assert StageReport.of(stage.numbers()) == stage
        nothing = StageReport().numbers()
        added = [sum(pair) for pair in zip(stage.numbers(), nothing, strict=True)]
        assert StageReport.of(added) == stage
    assert type(StageReport.of(StageReport(peak_bytes=5).numbers()).peak_bytes) is int
