"""Runs that were stopped go on from a checkpoint: the same bits, no line of metrics lost or twice."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
from reference import same_bits
from safetensors.torch import load_file

from penstock import ConfigError, PlanError
from penstock.conf.parts import CacheConfig, CheckpointConfig
from penstock.conf.schema import TrainConfig
from penstock.pipeline.run import train
from penstock.pipeline.run.resume import check, position
from penstock.scripts import command

JOB = (
    "model=mlp model.hidden=[16,12] data.size=8 data.channels=1 batch_size=200 micro_batches=3 max_steps=10"
    " optimizer.momentum=0.5 scheduler=cosine epochs=2 seed=3 threads=1 checkpoint.every=2 checkpoint.keep=2"
)
ALONE = f"{JOB} ranks=1 stages=2"


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def penstock(typed):
    assert command.run(["train", *typed.split()]) == 0


def refused(typed, capfd):
    capfd.readouterr()
    assert command.run(["train", *typed.split()]) == 2
    return capfd.readouterr().err


def losses(folder):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def kept(folder):
    return sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())


def same_run(ours, theirs):
    """Whether two runs ended with the same bits of the model."""
    a, b = (load_file(f"{folder}/model.safetensors") for folder in (ours, theirs))
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def unfinished(folder, step):
    """Make the run in ``folder`` one that was killed: metrics beyond the checkpoint, half a line, no end."""
    path = Path(folder)
    for name in ("summary.json", "model.safetensors", "timeline.json", "timeline.png"):
        (path / name).unlink()
    for newer in (path / "checkpoints").iterdir():
        if int(newer.name[5:]) > step:
            shutil.rmtree(newer)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "lo')


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    penstock(f"{ALONE} hydra.run.dir={folder}")
    return folder


def copied(whole, step):
    shutil.copytree(whole, "run")
    unfinished("run", step)


def test_a_run_keeps_the_newest_checkpoints_and_goes_on_from_the_last(whole, capfd):
    assert kept(whole) == ["step_00000008", "step_00000010"]
    copied(whole, 8)
    penstock(f"{ALONE} hydra.run.dir=run resume=auto")
    assert "goes on behind step 8 of 10" in capfd.readouterr().out
    assert losses("run") == losses(whole)
    assert [step for step, _ in losses("run")] == list(range(10))
    assert same_run("run", whole)
    assert kept("run") == kept(whole)
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["steps"] == 10
    assert summary["samples"] == 2000
    path = str(Path("run/checkpoints/step_00000008").absolute())
    assert summary["resumed_from"] == {"path": path, "step": 8, "repeated_steps": 2}
    assert json.loads((whole / "summary.json").read_text())["resumed_from"] is None


def test_what_is_done_again_is_said_and_replaced(whole, capfd):
    copied(whole, 8)
    first = Path("run/metrics.jsonl").read_text().splitlines()
    penstock(f"{ALONE} hydra.run.dir=run resume=auto")
    said = " ".join(capfd.readouterr().out.split())
    assert (
        "goes on behind step 8 of 10, from a checkpoint; steps 9-10 are done again, in metrics.jsonl" in said
    )
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    assert lines[:8] == first[:8]
    assert lines[8:] != first[8:10]  # its seconds
    assert len(lines) == 10


def test_a_run_that_goes_on_as_it_was_asked_keeps_its_plan(whole, monkeypatch, capfd):
    def decide(*_, **__):
        raise PlanError("measured again")

    copied(whole, 8)
    monkeypatch.setattr(train, "decide", decide)
    penstock(f"{ALONE} hydra.run.dir=run resume=auto")
    assert Path("run/plan.json").read_bytes() == (whole / "plan.json").read_bytes()
    assert "measured again" in refused(f"{ALONE} hydra.run.dir=other resume={whole} stages=3", capfd)


def test_the_norm_of_a_stage_on_another_cut_is_told(capfd):
    job = f"{ALONE} clip.norm=0.01 clip.scope=stage"
    penstock(f"{job} hydra.run.dir=first")
    for more, said in (("hydra.run.dir=same", 0), ("hydra.run.dir=other stages=3", 1)):
        penstock(f"{job} resume=first/checkpoints/step_00000008 {more}")
        told = " ".join(capfd.readouterr().err.split())
        assert told.count("bits may differ, for clip.scope=stage clips each stage: cuts=[") == said


def test_the_same_run_goes_on_with_other_stages_and_another_schedule(whole):
    copied(whole, 8)
    penstock(f"{ALONE} hydra.run.dir=run resume=auto stages=3 schedule=gpipe memory.tier=packed codec=raw")
    assert losses("run") == losses(whole)
    assert same_run("run", whole)


def test_another_run_goes_on_from_a_checkpoint_of_the_first(whole):
    penstock(f"{ALONE} hydra.run.dir=run resume={whole}/checkpoints/step_00000008 stages=4 schedule=gpipe")
    assert losses("run") == losses(whole)[8:]
    assert same_run("run", whole)
    penstock(f"{ALONE} hydra.run.dir=end resume={whole}")  # no step is left
    assert same_run("end", whole)


def test_a_damaged_checkpoint_is_told_and_the_one_before_taken(whole, capfd):
    copied(whole, 10)
    (part,) = Path("run/checkpoints/step_00000010").glob("rank_0_*")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    penstock(f"{ALONE} hydra.run.dir=run resume=auto")
    told = " ".join(capfd.readouterr().out.split())
    assert "is damaged" in told
    assert "the checkpoint before is taken" in told
    assert "goes on behind step 8 of 10" in told
    assert same_run("run", whole)
    assert losses("run") == losses(whole)


def test_folders_are_never_taken_over_silently(whole, capfd):
    assert "already holds a finished run" in refused(f"{ALONE} hydra.run.dir={whole} resume=auto", capfd)
    copied(whole, 8)
    before = Path("run/metrics.jsonl").read_bytes()
    assert "go on with it by resume=auto" in refused(f"{ALONE} hydra.run.dir=run", capfd)
    other = f"{ALONE} hydra.run.dir=run resume=auto optimizer.lr=0.9"
    assert "found optimizer.lr=0.9, and the checkpoint was made with optimizer.lr=" in refused(other, capfd)
    nowhere = f"{ALONE} hydra.run.dir=new resume=nowhere"
    assert "resume=nowhere holds no checkpoint" in refused(nowhere, capfd)
    assert Path("run/metrics.jsonl").read_bytes() == before
    assert not Path("new").exists()


def test_resume_auto_in_an_empty_folder_begins(whole):
    penstock(f"{ALONE} hydra.run.dir=run resume=auto")
    assert same_run("run", whole)


def config(**more):
    return TrainConfig(resume="auto", **more)


def notes(**more):
    return {"config": json.loads(json.dumps(dataclasses.asdict(TrainConfig(**more))))}


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"threads": 2}, {"threads": 1}, ["bits may differ .*: threads=2 was 1"]),
        ({"micro_batches": 4}, {}, ["bits may differ .*: micro_batches=4 was 8"]),
        ({"codec": "exponent"}, {"codec": "raw"}, []),
        ({"ranks": 3, "schedule": "gpipe", "deadline": 5}, {}, []),
        ({"epochs": 9, "guard": True}, {}, []),
        ({"data": {"workers": 2, "local": "/tmp"}}, {"data": {"workers": "auto", "local": None}}, []),
        ({"cache": CacheConfig(mode="shared", job="a")}, {}, []),
        ({"epochs": 9, "scheduler": {"_target_": "x"}}, {"scheduler": {"_target_": "x"}}, ["epochs=9 was 4"]),
    ],
)
def test_what_changes_bits_by_nature_is_said(ours, theirs, said):
    told = []
    check(config(**ours), notes(**theirs), told.append)
    assert len(told) == len(said)
    for pattern, sentence in zip(said, told, strict=True):
        assert re.search(pattern, sentence)


def test_a_checkpoint_from_before_an_option_goes_on():
    old = notes(data={"size": 8})
    del old["config"]["cache"]
    told = []
    check(config(data={"size": 8, "workers": "auto", "skip_broken": False, "local": None}), old, told.append)
    assert told == []
    with pytest.raises(ConfigError, match=r"found data.skip_broken=True.*data.skip_broken=False"):
        check(config(data={"size": 8, "skip_broken": True}), old, print)


@pytest.mark.parametrize(
    ("ours", "theirs", "key"),
    [
        ({"seed": 1}, {}, "seed=1"),
        ({"batch_size": 64}, {}, "batch_size=64"),
        ({"model": {"_target_": "a"}}, {"model": {"_target_": "b"}}, "model._target_=a"),
        ({"schedule": "async_1f1b", "micro_batches": 4}, {"schedule": "async_1f1b"}, "micro_batches=4"),
        (
            {"schedule": "async_1f1b", "checkpoint": CheckpointConfig(every=3)},
            {"schedule": "async_1f1b", "checkpoint": CheckpointConfig(every=2)},
            "checkpoint.every=3",
        ),
    ],
)
def test_another_training_is_refused(ours, theirs, key):
    with pytest.raises(ConfigError, match=f"the same training, found {key}"):
        check(config(**ours), notes(**theirs), print)


def test_a_place_in_the_data():
    assert [position(step, 4) for step in (0, 1, 4, 5, 8)] == [(0, 0), (0, 1), (0, 4), (1, 1), (1, 4)]
