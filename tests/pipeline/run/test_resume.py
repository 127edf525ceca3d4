"""Runs that were stopped go on from a checkpoint: the same bits, no line of metrics lost or twice."""

import dataclasses
import json
import re
import shutil
import time
from pathlib import Path

import pytest
from commands import SMALL, losses, refusal, same_model, same_run, summary, trained

from penstock import CheckpointError, ConfigError, PlanError
from penstock.conf.schema import CacheConfig, CheckpointConfig, ReplicasConfig, TrainConfig
from penstock.pipeline.run import train
from penstock.pipeline.run.checkpoints import Checkpoints, first_whole
from penstock.pipeline.run.resume import check, position

ALONE = (
    f"{SMALL} batch_size=200 micro_batches=3 max_steps=10 optimizer.momentum=0.5 scheduler=cosine epochs=2"
    " checkpoint.every=2 checkpoint.keep=2 ranks=1 stages=2"
)
AGAIN = f"{ALONE} hydra.run.dir=run resume=auto"


def kept(folder):
    return sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    trained(f"{ALONE} hydra.run.dir={folder}")
    return folder


def killed(whole, step):
    """Make ``run`` one that was killed: metrics beyond the checkpoint, half a line, no end."""
    path = Path("run")
    shutil.copytree(whole, path)
    for name in ("summary.json", "model.safetensors", "timeline.json", "timeline.png"):
        (path / name).unlink()
    for newer in (path / "checkpoints").iterdir():
        if int(newer.name[5:]) > step:
            shutil.rmtree(newer)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "lo')


def words(text):
    return " ".join(text.split())


def test_a_run_keeps_the_newest_checkpoints_and_its_plan_and_goes_on_from_the_last(whole, monkeypatch, capfd):
    def decide(*_, **__):
        raise PlanError("measured again")

    assert kept(whole) == ["step_00000008", "step_00000010"]
    killed(whole, 8)
    first = Path("run/metrics.jsonl").read_text().splitlines()
    monkeypatch.setattr(train, "decide", decide)
    trained(AGAIN)
    assert "behind step 8 of 10, from a checkpoint; steps 9-10 are done again, in metrics.jsonl" in words(
        capfd.readouterr().out
    )
    again = Path("run/metrics.jsonl").read_text().splitlines()
    assert again[:8] == first[:8]
    assert again[8:] != first[8:10]  # its seconds
    assert [step for step, _ in losses("run")] == list(range(10))
    assert same_run("run", whole)
    assert kept("run") == kept(whole)
    path = str(Path("run/checkpoints/step_00000008").absolute())
    assert summary("run")["resumed_from"] == {"path": path, "step": 8, "repeated_steps": 2}
    assert (summary("run")["steps"], summary("run")["samples"]) == (10, 2000)
    assert summary(whole)["resumed_from"] is None
    assert Path("run/plan.json").read_bytes() == (whole / "plan.json").read_bytes()
    assert "measured again" in refusal(f"{ALONE} hydra.run.dir=other resume={whole} stages=3", capfd)


@pytest.mark.slow
def test_the_norm_of_a_stage_on_another_cut_is_told(capfd):
    job = f"{ALONE} clip.norm=0.01 clip.scope=stage"
    trained(f"{job} hydra.run.dir=first")
    for more, said in (("hydra.run.dir=same", 0), ("hydra.run.dir=other stages=3", 1)):
        trained(f"{job} resume=first/checkpoints/step_00000008 {more}")
        told = words(capfd.readouterr().err)
        assert told.count("bits may differ, for clip.scope=stage clips each stage: cuts=[") == said


def test_another_run_goes_on_from_a_checkpoint_of_the_first(whole):
    trained(f"{ALONE} hydra.run.dir=run resume={whole}/checkpoints/step_00000008 stages=4 schedule=gpipe")
    assert losses("run") == losses(whole)[8:]
    assert same_model("run", whole)
    trained(f"{ALONE} hydra.run.dir=end resume={whole}")  # no step is left
    assert same_model("end", whole)


def test_behind_a_damaged_checkpoint_the_one_before_goes_on_with_other_stages(whole, capfd):
    killed(whole, 10)
    (part,) = Path("run/checkpoints/step_00000010").glob("rank_0_*")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    trained(f"{AGAIN} stages=3 schedule=gpipe memory.tier=packed codec=raw")
    told = words(capfd.readouterr().out)
    assert "is damaged" in told
    assert "the checkpoint before is taken" in told
    assert "goes on behind step 8 of 10" in told
    assert same_run("run", whole)


def test_folders_are_never_taken_over_silently(whole, capfd):
    assert "already holds a finished run" in refusal(f"{ALONE} hydra.run.dir={whole} resume=auto", capfd)
    killed(whole, 8)
    before = Path("run/metrics.jsonl").read_bytes()
    assert "go on with it by resume=auto" in refusal(f"{ALONE} hydra.run.dir=run", capfd)
    other = f"{AGAIN} optimizer.lr=0.9"
    assert "found optimizer.lr=0.9, and the checkpoint was made with optimizer.lr=" in refusal(other, capfd)
    nowhere = f"{ALONE} hydra.run.dir=new resume=nowhere"
    assert "resume=nowhere holds no checkpoint" in refusal(nowhere, capfd)
    assert Path("run/metrics.jsonl").read_bytes() == before
    assert not Path("new").exists()


def config(**more):
    return TrainConfig(resume="auto", **more)


def notes(**more):
    return {"config": json.loads(json.dumps(dataclasses.asdict(TrainConfig(**more))))}


TWO = {"replicas": ReplicasConfig(count=[1, 1])}


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"threads": 2}, {"threads": 1}, ["bits may differ .*: threads=2 was 1"]),
        ({"micro_batches": 4}, {}, ["bits may differ .*: micro_batches=4 was 8"]),
        ({"replicas": ReplicasConfig(count=2), "ranks": 2}, TWO, ["bits may differ .*replicas.count=2 was"]),
        ({"replicas": ReplicasConfig(count=2, exact=True), "ranks": 2}, TWO, []),
        ({"ranks": 2}, TWO, []),
        ({"codec": "exponent"}, {"codec": "raw"}, []),
        ({"ranks": 3, "schedule": "gpipe", "deadline": 5}, {}, []),
        ({"epochs": 9, "detect_anomaly": True}, {}, []),
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


STREAM = {"schedule": "async_1f1b"}


@pytest.mark.parametrize(
    ("ours", "theirs", "key"),
    [
        ({"seed": 1}, {}, "seed=1"),
        ({"batch_size": 64}, {}, "batch_size=64"),
        ({"model": {"_target_": "a"}}, {"model": {"_target_": "b"}}, "model._target_=a"),
        (STREAM | {"micro_batches": 4}, STREAM, "micro_batches=4"),
        (
            STREAM | {"checkpoint": CheckpointConfig(every=3)},
            STREAM | {"checkpoint": CheckpointConfig(every=2)},
            "checkpoint.every=3",
        ),
    ],
)
def test_another_training_is_refused(ours, theirs, key):
    with pytest.raises(ConfigError, match=f"the same training, found {key}"):
        check(config(**ours), notes(**theirs), print)


def test_a_place_in_the_data():
    assert [position(step, 4) for step in (0, 1, 4, 5, 8)] == [(0, 0), (0, 1), (0, 4), (1, 1), (1, 4)]


def test_where_every_checkpoint_is_damaged_nobody_is_sent_to_an_earlier_one():
    def damaged(folder):
        raise CheckpointError(f"{folder} is damaged; take an earlier checkpoint")

    told: list[str] = []
    with pytest.raises(CheckpointError, match=r"^a is damaged, and so are the 2 after it; there is no other"):
        first_whole([Path("c"), Path("b"), Path("a")], damaged, told.append)
    assert [sentence.split()[0] for sentence in told] == ["c", "b"]
    with pytest.raises(CheckpointError, match=r"^a is damaged; take an earlier checkpoint$"):
        first_whole([Path("a")], damaged, told.append)


def test_a_checkpoint_begins_once_older_ones_are_removed(monkeypatch):
    keep, after = Checkpoints._keep, Checkpoints.after
    monkeypatch.setattr(Checkpoints, "_keep", lambda self: (time.sleep(0.6), keep(self)))
    monkeypatch.setattr(Checkpoints, "after", lambda *given: (time.sleep(0.05), after(*given)))
    steps = "ranks=1 max_steps=8 checkpoint.every=4 checkpoint.keep=9"
    trained(f"{SMALL} batch_size=24 {steps} hydra.run.dir=run")
    found = sorted(Path("run/checkpoints").glob("step_*/index.json"))
    assert [path.parent.name for path in found] == ["step_00000004", "step_00000008"]
