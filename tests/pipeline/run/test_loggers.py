"""Files of a run for other tools: CSV, the events of TensorBoard, a run of Weights & Biases."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from reports import report

from penstock.compression.errors import ConfigError
from penstock.conf.schema import TrainConfig
from penstock.pipeline.run import early, logs
from penstock.pipeline.run.logs import Loggers

TRAIN = [
    sys.executable, "-m", "penstock.scripts.command", "train", "model=mlp", "data=digits", "ranks=1",
    "stages=2", "epochs=2", "max_steps=3", "batch_size=600", "threads=1",
]  # fmt: skip


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
    class Broken:
        def __init__(self, *_: object, **__: object) -> None:
            self.fail("open")

        def fail(self, now: str) -> None:
            if now == when:
                raise OSError(28, "No space left on device")

        def write(self, *_: object) -> None:
            self.fail("write")

        def close(self) -> None:
            self.fail("close")

    monkeypatch.setitem(logs.LOGGERS, "broken", Broken)  # pyright: ignore[reportArgumentType]
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
    """By their own readers, from a run on the command line that was given all three."""
    pytest.importorskip("tensorboard")
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    done = subprocess.run(
        [*TRAIN, f"hydra.run.dir={run}", "logger=[csv,tensorboard,wandb]"],
        capture_output=True, text=True, timeout=400, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "failed" not in done.stdout
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows(run) if row["loss"]] == list(map(str, losses))
    assert [path.name for path in run.glob("wandb/offline-run-*/*.wandb")]
    assert not (tmp_path / "wandb").exists()
    read = subprocess.run(
        [sys.executable, "-c", READ, str(run)], capture_output=True, text=True, timeout=400, check=True
    )
    events, history, options = json.loads(read.stdout.splitlines()[-1])
    assert events == pytest.approx(losses)
    assert history == losses
    assert "model" in options


READ = """
import glob, json, struct, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2 as pb

def records(data, place=7, block=32768):  # LevelDB's log format, behind seven bytes of W&B's own
    whole = b""
    while place + 7 <= len(data):
        length, kind = struct.unpack_from("<HB", data, place + 4)
        whole += data[place + 7 : (place := place + 7 + length)]
        if kind in (1, 4):
            yield whole
            whole = b""
        if block - place % block < 7:
            place += block - place % block

events = EventAccumulator(sys.argv[1] + "/tensorboard").Reload()
history, options = [], []
for data in records(open(glob.glob(sys.argv[1] + "/wandb/offline-run-*/*.wandb")[0], "rb").read()):
    record = pb.Record.FromString(data)
    for item in record.history.item:
        if (item.key or item.nested_key[0]) == "loss":
            history.append(json.loads(item.value_json))
    options += [update.key for update in record.run.config.update]
print(json.dumps([[one.value for one in events.Scalars("loss")], history, options]))
"""
