"""Runs whose samples are loaded ahead: the bits are those of a run that loads as it goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from penstock.pipeline.samples.reading import order_of
from penstock.scripts import command

JOB = (
    "data=image_folder data.root=images data.size=8 model=mlp model.hidden=[16,12,8] batch_size=6"
    " micro_batches=3 epochs=2 seed=3 threads=1 schedule=gpipe codec=raw extra_in_flight=0"
)


@pytest.fixture(autouse=True)
def images(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = torch.Generator().manual_seed(0)
    for split, number in (("train", 10), ("test", 3)):
        for name in ("cats", "dogs"):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for index in range(number):
                pixels = torch.randint(256, (9, 7, 3), dtype=torch.uint8, generator=source)
                Image.fromarray(pixels.numpy()).save(folder / f"{index}.png")


def train(folder, more=""):
    assert command.run(["train", *JOB.split(), *more.split(), f"hydra.run.dir={folder}"]) == 0
    summary = json.loads(Path(folder, "summary.json").read_text())
    losses = [json.loads(line)["loss"] for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    return Path(folder, "model.safetensors").read_bytes(), losses, summary


def test_the_bits_do_not_hang_on_who_loads(capfd):
    plain = train("plain", "ranks=1 stages=3 data.workers=0")
    ahead = train("ahead", "ranks=1 stages=3 data.workers=2")
    assert ahead[:2] == plain[:2]
    assert ahead[2]["test_loss"] == plain[2]["test_loss"]
    assert [run[2]["data"][0]["workers"] for run in (plain, ahead)] == [0, 2]
    assert "waited for samples: " in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.ranks
def test_of_three_ranks_the_one_in_the_middle_loads_nothing():
    plain = train("plain", "ranks=1 stages=3 data.workers=0")
    ranks = train("ranks", "ranks=3 data.workers=1")
    assert ranks[:2] == plain[:2]
    assert ranks[2]["test_loss"] == plain[2]["test_loss"]
    assert [row["workers"] for row in ranks[2]["data"]] == [1, 0, 0]


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_leave_the_same_samples_out():
    first = int(order_of(20, seed=3, epoch=0)[0])  # which is in the example, too
    for name in (f"train/{'cats' if first < 10 else 'dogs'}/{first % 10}.png", "test/dogs/1.png"):
        Path("images", name).write_bytes(b"no image")
    plain = train("plain", "ranks=1 stages=3 data.skip_broken=true")
    ranks = train("ranks", "ranks=3 data.skip_broken=true")
    assert ranks[:2] == plain[:2]
    assert {row["left_out"] for row in plain[2]["data"] + ranks[2]["data"]} == {4}  # twice, with a test each


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_ends_at_a_sample_that_cannot_be_read(workers, capfd):
    Path("images/train/dogs/4.png").write_bytes(b"no image")
    job = f"{JOB} ranks=1 stages=1 data.workers={workers} cuts=[]"
    assert command.run(["train", *job.replace("seed=3", "seed=1").split()]) == 2
    error = capfd.readouterr().err
    assert "images/train/dogs/4.png is not an image that can be read" in error
    assert "data.skip_broken=true" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("data.workers=-1", "data.workers=-1 must be auto, or 0 or more"),
        ("data.workers=many", "data.workers=many must be auto, or 0 or more"),
        ("data.skip_broken=3", "data.skip_broken=3"),
    ],
)
def test_what_is_no_number_of_processes_is_refused(typed, told, capfd):
    assert command.run(["train", *JOB.split(), typed]) == 2
    assert told in capfd.readouterr().err
