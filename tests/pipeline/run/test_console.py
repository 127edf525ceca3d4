"""Figures of a run: lines and totals, tables for a log and a terminal, files for other tools."""

import csv
import dataclasses
import io
import json
import os
import sys
from pathlib import Path

import checkout
import pytest
from commands import SMALL, lines, trained
from reports import PLAN, report
from rich.console import Console

from penstock import ConfigError
from penstock.conf.schema import TrainConfig
from penstock.pipeline.run import console, early, logs, tables
from penstock.pipeline.run.logs import Loggers
from penstock.pipeline.run.metrics import Totals, step_line, summarise
from penstock.pipeline.runtime.report import together


def log(width: int = console.WIDTH_OF_A_LOG) -> Console:
    return Console(file=io.StringIO(), width=width)


def written(to: Console) -> list[str]:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue().splitlines()


def summary_of(*reports):
    totals = Totals(num_stages=2)
    for one in reports:
        totals.add(one)
    sizes = {"a.weight": 1500, "b.weight": 6, "c.weight": 7}
    test = {"accuracy": 0.9653, "loss": 0.1234}
    more = {"ranks": 2, "threads": 1, "codec": "raw", "turns": [], "flows": []}
    return summarise(totals, PLAN, sizes=sizes, test=test, **more)


def summary(**more):
    return summary_of(report(0), report(1)) | more


def closed(found, *, columns=110, files=()):
    """The words of each line that a run ends with."""
    screen = log(columns)
    console.close(found, files, console=screen)
    return [line.split() for line in written(screen)]


def test_the_closing_table_has_a_row_a_stage_then_the_totals_and_the_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = closed(summary(), files=[tmp_path / "run" / "timeline.png", tmp_path.parent / "plan.png"])
    assert found[1] == "0 0 0.8 s 20% 5 KiB 9 KiB 200 B -> 80 B (2.50x) -".split()
    assert found[2] == "1 1 0.4 s 60% 3 KiB 8 KiB - 160 B -> 120 B (1.33x)".split()
    totals = [" ".join(words) for words in found[3 + len(tables.KEY) :]]
    assert "360 B -> 200 B (1.80x)" in totals[0]
    for figure in ("2 steps", "16 samples", "16 samples/s", "last loss 1.5000"):
        assert figure in totals[1]
    assert "96.53%" in totals[2]
    assert totals[-1].split() == ["run/timeline.png", str(tmp_path.parent / "plan.png")]


def test_each_rank_of_a_stage_has_a_row_and_is_told_what_it_exchanged():
    one = report()
    first, last = one.stages
    own = dataclasses.replace(first, disk_tier=7, exchanged_bytes=1024)
    other = dataclasses.replace(own, rank=2, peak_bytes=1024, disk_tier=9, compute_seconds=0.25)
    both = (own, other), (last,)
    step = dataclasses.replace(one, stages=tuple(map(together, both)), replicas=both)
    assert step.busy_seconds == (0.4, 0.2, 0.25)
    found = summary_of(step, step)
    rows = closed(found)[1:4]
    assert [row[:2] for row in rows] == [["0", "0"], ["0", "2"], ["1", "1"]]
    assert rows[1][2:8] == ["0.5", "s", "50%", "1", "KiB", "9"]
    assert found["stages"][0]["bytes_exchanged"] == 4096
    assert "4 KiB: 2 KiB by rank 0, 2 KiB by rank 2" in " ".join(tables.totals(found))
    assert [(row["rank"], row["peak_bytes"]) for row in found["tiers"] if row["tier"] == "disk"] == [
        (0, 7), (2, 9),
    ]  # fmt: skip


def test_sums_go_on_with_other_replicas_and_anew_with_other_stages():
    totals, one = Totals(num_stages=2), report()
    totals.add(one)
    before = totals.kept()
    resumed, fewer = Totals(num_stages=2), Totals(num_stages=1)
    resumed.load(before)
    assert resumed.kept() == before | {"here": 0}
    assert not resumed.recent
    both = (one.stages[0], dataclasses.replace(one.stages[0], rank=2)), one.stages[1:]
    resumed.add(dataclasses.replace(one, replicas=both))
    assert [total["compute_seconds"] for total in resumed.of_ranks[0]] == [0.8, 0.4]
    assert resumed.stages[0]["compute_seconds"] == pytest.approx(1.2)
    fewer.load(before)
    assert (fewer.num_steps, fewer.stages) == (1, Totals(num_stages=1).stages)


@pytest.mark.parametrize(("columns", "gpu"), [(80, False), (110, False), (110, True)])
def test_the_table_fits_a_terminal_of_80_columns_and_a_log(columns, gpu):
    big = summary()
    for stage in big["stages"]:
        stage |= dict.fromkeys((name for name in stage if name.startswith("bytes_")), 99 * 2**29)
        stage |= {"compute_seconds": 34567.8, "bubble": 1.0}
        stage |= {"peak_bytes": 99 * 2**29, "resident_bytes": 2**39}
        stage |= {"compute_seconds": 1.0, "device_bytes": 99 * 2**29} if gpu else {}
    pair = [0.0528, 0.0528]
    big["prediction"] = {"stages": [dict.fromkeys(tables.OF_A_STEP, pair)] * 2, "off": None}
    for stage in big["stages"]:
        stage |= {"predicted_bytes": 73.6 * 2**20, "peak_bytes": 73.6 * 2**20}
    screen = log(columns)
    console.close(big, [], console=screen)
    table = written(screen)[:6]
    assert all(len(line) <= columns for line in table)
    assert not any("…" in line for line in table)
    assert "49.5 GiB" in table[1]
    assert table[4].count("52.8 ms") == 6
    assert table[0].endswith(" GPU") == gpu


def test_what_stages_of_a_rank_share_is_told_once_and_what_nobody_counted_is_a_dash():
    shared, uncounted = summary(), summary()
    for stage in shared["stages"]:
        stage |= {"rank": 0, "bubble": 0.25, "resident_bytes": 2048}
    for stage in uncounted["stages"]:
        stage |= {"peak_bytes": 0, "resident_bytes": 0}
    first, last = closed(shared)[1:3]
    assert first[:8] == "0 0 0.8 s 25% 5 KiB 2".split()
    assert last[:7] == "1 0 0.4 s 3 KiB -".split()
    assert closed(uncounted)[1][5:7] == ["-", "-"]


def test_a_log_gets_the_first_and_the_last_step_whose_speed_forgets_the_slow_first_one():
    screen = log()
    with console.Training(3, console=screen) as progress:
        for step, seconds in enumerate((10.0, 0.5, 0.5)):
            progress.step(report(step, seconds=seconds))
        progress.note("epoch 1/1")
    first, last, note = written(screen)
    assert "step 1/3" in first
    assert "  1 samples/s" in first
    for figure in ("step 3/3", "loss 1.5000", "  16 samples/s", "540 B -> 300 B (1.80x)", "ETA 0:00"):
        assert figure in last
    assert note == "epoch 1/1"


def test_a_terminal_gets_a_bar_with_the_same_facts():
    screen = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with console.Training(2, console=screen) as progress:
        progress.step(report(0))
        progress.step(report(1))
    assert "2/2 loss 1.5000  16 samples/s  360 B -> 200 B (1.80x)" in " ".join(written(screen))


def test_an_error_is_one_line_on_standard_error(capsys):
    console.warn("two\nlines  here")
    assert capsys.readouterr() == ("", "penstock: two lines here\n")


FLOW = {"value": "relu", "way": "F", "source": 0, "target": 1, "bytes_raw": 9, "bytes_sent": 5}
TURN = {"name": "by price", "extra": 1, "predicted": 0.5, "measured": 0.512, "stayed": True}
CHOSEN = {
    "codec": "auto",
    "flows": [FLOW | {"codec": "exponent"}, FLOW | {"way": "B", "codec": "raw", "bytes_raw": 8}],
    "turns": [TURN | {"extra": 0}, TURN | {"extra": 0, "name": "raw", "measured": 0.75, "stayed": False}],
}


@pytest.mark.parametrize(
    ("found", "said", "unsaid"),
    [
        ({"bytes_raw": 0, "bytes_sent": 0, "loss": None}, ["last loss no number"], ["sent between"]),
        ({"codec": "auto"}, ["the run ended before a choice"], ["lossy"]),
        ({"codec": "auto", "bytes_raw": 0, "bytes_sent": 0}, [], ["before a choice"]),
        ({}, [], ["before a choice", "lossy"]),
        ({"codec": "int8"}, ["int8 (lossy)"], []),
        ({"bytes_saved_raw": 2048, "bytes_saved_kept": 1024}, ["2 KiB -> 1 KiB (2.00x)"], []),
        (CHOSEN, ["relu down exponent; relu up raw", "costs say: 0.512 s", "0.750 s", ", chosen"], []),
        (
            {"turns": [TURN]},
            ["extra_in_flight=auto compared what measured costs say, +1 in flight: 0.512 s"],
            [],
        ),
    ],
)
def test_the_totals_say_what_was_chosen_and_what_is_missing(found, said, unsaid):
    lines = "\n".join(tables.totals(summary(**found)))
    assert all(words in lines for words in said), lines
    assert not any(words in lines for words in unsaid), lines


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("opened", [lambda: open("/dev/full", "w"), closed_pipe], ids=["full", "closed"])
def test_output_that_cannot_be_written_ends_no_training_and_is_told_once(opened, monkeypatch, capsys):
    with opened() as output:
        monkeypatch.setattr("sys.stdout", output)
        trained(f"{SMALL} batch_size=200 max_steps=2 ranks=1 stages=2 hydra.run.dir=run")
    assert len(lines("run")) == 2
    told = capsys.readouterr().err
    assert told.count("standard output cannot be written any more") == 1
    assert told.count("\n") == 1


def test_a_line_holds_what_the_step_did_in_both_directions():
    assert step_line(report(3)) == {
        "step": 3,
        "loss": 1.5,
        "seconds": 0.5,
        "samples_per_second": 16.0,
        **dict.fromkeys(("tokens_per_second", "learning_rate", "gradient_norm")),
        "bytes_raw": 180,
        "bytes_sent": 100,
        "bubble": pytest.approx(0.4),
        "peak_bytes": 5120,
        "bytes_raw_forward": 100,
        "bytes_raw_backward": 80,
        "bytes_sent_forward": 40,
        "bytes_sent_backward": 60,
    }


def test_the_summary_adds_up_the_steps():
    summary = summary_of(report(0, loss=2.0), report(1, loss=1.0))
    assert (summary["test_accuracy"], summary["loss"], summary["ranks"]) == (0.9653, 1.0, 2)
    assert (summary["steps"], summary["samples"], summary["seconds"]) == (2, 16, 1.0)
    assert summary["samples_per_second"] == 16.0
    assert (summary["bytes_raw"], summary["bytes_sent"], summary["ratio"]) == (360, 200, 1.8)
    first, last = summary["stages"]
    names = ("layers", "first_layer", "last_layer", "parameters")
    assert [first[name] for name in names] == [2, "a", "b", 1506]
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


TRAIN = (
    "-m penstock train model=mlp data=digits ranks=1 stages=2 epochs=2 max_steps=3 batch_size=600 threads=1"
    " logger=[csv,tensorboard,wandb]"
)


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def opened(names: list[str], folder: Path, *, first: int = 0, told: list[str] | None = None) -> Loggers:
    return Loggers(names, folder, first=first, options={}, tell=(told if told is not None else []).append)


def test_a_table_has_a_line_for_each_step_and_each_test_and_a_new_run_begins_anew(tmp_path):
    for _ in range(2):
        with opened(["csv"], tmp_path) as log:
            log.step(report(0, loss=2.0))
            assert rows(tmp_path)[0]["loss"] == "2.0"  # at once, so that a killed run keeps it
            log.test(0, {"accuracy": 0.5, "loss": float("nan")})
            log.step(report(1, loss=float("nan")))
    names = "step samples_per_second loss test_accuracy test_loss".split()
    assert [[row[name] for name in names] for row in rows(tmp_path)] == [
        ["0", "16.0", "2.0", "", ""], ["0", "", "", "0.5", "nan"], ["1", "16.0", "", "", ""],
    ]  # fmt: skip


@pytest.mark.parametrize("left", ["", "2,", '2,"', "x"])
def test_a_run_that_goes_on_cuts_off_what_is_done_again(tmp_path, left):
    with opened(["csv"], tmp_path) as log:
        for step in range(4):
            log.step(report(step))
            log.test(step, {"accuracy": 0.5, "loss": step})
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write(left)
    with opened(["csv"], tmp_path, first=2) as log:
        log.test(1, {"accuracy": 0.75, "loss": 7})
        log.step(report(2))
    assert [(row["step"], row["test_loss"]) for row in rows(tmp_path)] == [
        ("0", ""), ("0", "0"), ("1", ""), ("1", "7"), ("2", ""),
    ]  # fmt: skip


@pytest.mark.parametrize("when", ["open", "write", "close"])
def test_what_fails_is_told_once_and_ends_nothing(tmp_path, when, monkeypatch):
    def fail(now: str) -> None:
        if now == when:
            raise OSError(28, "No space left on device")

    def broken(*_: object) -> logs.Logger:
        fail("open")
        return lambda *_: fail("write"), lambda: fail("close")

    monkeypatch.setitem(logs.LOGGERS, "broken", broken)  # pyright: ignore[reportArgumentType]
    told: list[str] = []
    with opened(["broken", "csv"], tmp_path, told=told) as log:
        for step in range(3):
            log.step(report(step))
    assert told == ["logger=broken failed (No space left on device); training goes on without it"]
    assert len(rows(tmp_path)) == 3


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_logger_without_its_package_is_refused_by_name(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(early, "_findable", lambda module: module != name)
    with pytest.raises(ConfigError, match=f"logger={name} needs the package {name}.*pip install {name}"):
        early.check(TrainConfig(logger=["csv", name]))


@pytest.mark.parametrize("logger", ["mlflow", ["csv", "mlflow"], 3, {"csv": 1}])
def test_an_unknown_logger_is_refused_with_those_that_are_known(logger):
    with pytest.raises(ConfigError, match="known are csv, tensorboard, wandb"):
        TrainConfig(logger=logger)


@pytest.mark.slow
def test_tensorboard_and_wandb_read_what_a_run_wrote(tmp_path):
    """From a run on the command line that was given all three."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    assert "failed" not in checkout.run(*TRAIN.split(), f"hydra.run.dir={run}", cwd=tmp_path, seconds=400)
    losses = [line["loss"] for line in lines(run)]
    assert [row["loss"] for row in rows(run) if row["loss"]] == list(map(str, losses))
    (records,) = run.glob("wandb/offline-run-*/*.wandb")
    assert all(str(loss).encode() in records.read_bytes() for loss in losses)
    assert not (tmp_path / "wandb").exists()
    read = checkout.run("-c", READ, str(run), cwd=tmp_path, seconds=400)
    assert json.loads(read.splitlines()[-1]) == pytest.approx(losses)


READ = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

events = EventAccumulator(sys.argv[1] + "/tensorboard").Reload()
print(json.dumps([one.value for one in events.Scalars("loss")]))
"""
