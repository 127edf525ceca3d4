"""Ranks that are lost are started again: the same bits, said in one line, and no error is tried twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from reference import same_bits
from safetensors.torch import load_file

from penstock import ConfigError
from penstock.conf.parts import CheckpointConfig
from penstock.conf.schema import TrainConfig
from penstock.pipeline.ranks.failure import Lost
from penstock.pipeline.run.restarts import persist
from penstock.pipeline.run.run_folder import RunFolder
from penstock.scripts import command

pytestmark = pytest.mark.ranks

# Five steps an epoch of 40 samples each.
JOB = (
    "model=mlp model.hidden=[16,12] data._target_=own_digits.samples data.workers=0 batch_size=40"
    " micro_batches=3 epochs=2"
    " optimizer.momentum=0.5 scheduler=cosine seed=3 threads=1 deadline=60 codec=zero_value"
)
KEPT = f"{JOB} checkpoint.every=2"


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def penstock(typed):
    return command.run(["train", *typed.split()])


def deadly(monkeypatch, *, deaths=1, victim=1, after=281, by="SIGKILL"):
    """Let rank ``victim`` die at its ``after``-th sample in as many of its starts."""
    for number in range(deaths):
        Path(f"kill_{number}").touch()
    for name, value in {"VICTIM": victim, "AFTER": after, "BY": by}.items():
        monkeypatch.setenv(name, str(value))


def losses(folder):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def same_run(ours, theirs):
    a, b = (load_file(f"{folder}/model.safetensors") for folder in (ours, theirs))
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert penstock(f"{KEPT} ranks=1 stages=2 hydra.run.dir={folder}") == 0
    return folder


def test_a_killed_rank_is_started_again_and_the_bits_stay(whole, monkeypatch, capfd):
    deadly(monkeypatch)
    assert penstock(f"{KEPT} max_restarts=1 hydra.run.dir=run") == 0
    (said,) = [line for line in capfd.readouterr().err.splitlines() if "restart" in line]
    assert said.startswith("penstock: rank 1 (stage 1) was killed by SIGKILL")
    assert "; restart 1 of 1 goes on behind step 6" in said or "behind step 4" in said
    assert same_run("run", whole)
    assert losses("run") == losses(whole)


@pytest.mark.slow
def test_a_process_that_loads_is_lost_like_its_rank(whole, monkeypatch, capfd):
    deadly(monkeypatch)
    job = KEPT.replace("data.workers=0", "data.workers=1")
    assert penstock(f"{job} max_restarts=1 hydra.run.dir=run") == 0
    (said,) = [line for line in capfd.readouterr().err.splitlines() if "restart" in line]
    assert "a process that loads samples was lost" in said
    assert same_run("run", whole)
    assert losses("run") == losses(whole)


def test_without_a_checkpoint_it_begins_anew_and_says_so(whole, monkeypatch, capfd):
    deadly(monkeypatch)
    assert penstock(f"{JOB} max_restarts=1 hydra.run.dir=run") == 0
    assert "; restart 1 of 1 begins anew: there is no checkpoint\n" in capfd.readouterr().err
    assert same_run("run", whole)
    assert losses("run") == losses(whole)


@pytest.mark.slow
def test_one_process_is_started_again_too(whole, monkeypatch, capfd):
    deadly(monkeypatch, victim=0)
    assert penstock(f"{KEPT} ranks=1 stages=2 max_restarts=2 hydra.run.dir=run") == 0
    assert "; restart 1 of 2 goes on behind step" in capfd.readouterr().err
    assert same_run("run", whole)
    assert losses("run") == losses(whole)


@pytest.mark.slow
def test_the_last_loss_is_told_as_the_end(monkeypatch, capfd):
    deadly(monkeypatch, deaths=2)
    assert penstock(f"{KEPT} max_restarts=1 hydra.run.dir=run") == 2
    said = capfd.readouterr().err.splitlines()
    assert sum("restart 1 of 1" in line for line in said) == 1
    assert said[-1].startswith("penstock: rank 1 (stage 1) was killed by SIGKILL")
    assert "restart" not in said[-1]
    assert penstock(f"{KEPT} hydra.run.dir=run resume=auto") == 0


@pytest.mark.slow
def test_a_rank_that_dies_again_at_once_is_done_without(whole, monkeypatch, capfd):
    deadly(monkeypatch, deaths=2, after=1)
    assert penstock(f"{KEPT} max_restarts=3 min_ranks=1 stages=2 hydra.run.dir=run") == 0
    said = [line for line in capfd.readouterr().err.splitlines() if "restart" in line]
    assert ["with ranks=1" in line for line in said] == [False, True]
    assert json.loads(Path("run/plan.json").read_text())["stages"][1]["ranks"] == [0]
    assert same_run("run", whole)
    assert losses("run") == losses(whole)


def test_a_lost_replica_is_done_without_and_the_bits_stay(whole, monkeypatch, capfd):
    deadly(monkeypatch, victim=2)
    job = f"{KEPT} ranks=3 replicas.count=[1,2] replicas.exact=true replicas.shrink=true"
    assert penstock(f"{job} hydra.run.dir=run") == 0
    (said,) = [line for line in capfd.readouterr().err.splitlines() if "without it" in line]
    assert said.startswith("penstock: rank 2 (stage 1) was killed by SIGKILL")
    assert "; goes on behind step " in said
    assert said.endswith(", without it: replicas.count=[1, 1]")
    plan = json.loads(Path("run/plan.json").read_text())
    assert [stage["ranks"] for stage in plan["stages"]] == [[0], [1]]
    assert same_run("run", whole)
    assert losses("run") == losses(whole)


@pytest.mark.slow
def test_a_rank_without_replicas_ends_the_run_by_name(monkeypatch, capfd):
    deadly(monkeypatch, victim=0)
    job = f"{KEPT} ranks=3 replicas.count=[1,2] replicas.shrink=true"
    assert penstock(f"{job} hydra.run.dir=run") == 2
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith("penstock: rank 0 (stage 0) was killed by SIGKILL")


def test_a_rank_that_is_lost_again_later_keeps_its_place(capfd):
    """Steps that are done again after a restart count as done."""
    config = TrainConfig(max_restarts=2, min_ranks=1)
    folder, made = RunFolder(path=Path()), [10, 5, 5]

    def start(config, _):
        folder.metrics.write_text("{}\n" * made.pop(0))
        raise Lost("rank 1 was killed", rank=1)

    with pytest.raises(Lost, match="rank 1 was killed"):
        persist(config, None, folder, start, replan=lambda _: pytest.fail("it has its place"))  # type: ignore[arg-type]
    assert config.ranks == 2
    assert capfd.readouterr().err.count("begins anew: there is no checkpoint") == 2


@pytest.mark.slow
def test_an_error_of_its_own_is_not_tried_again(monkeypatch, capfd):
    deadly(monkeypatch)
    monkeypatch.setenv("BY", "NO_SIGNAL")  # an AttributeError in the data set
    assert penstock(f"{KEPT} max_restarts=3 hydra.run.dir=run") == 2
    said = capfd.readouterr().err
    assert "restart" not in said
    assert "AttributeError" in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_restarts": -1}, "max_restarts=-1 must be 0 or more"),
        ({"min_ranks": 1}, "min_ranks=1 is for restarts; add max_restarts="),
        ({"min_ranks": 3, "max_restarts": 1}, "min_ranks=3 is more than ranks=2"),
        ({"min_ranks": 1, "max_restarts": 1, "plan": "p.json"}, "does not go with plan=p.json"),
        ({"min_ranks": 1, "max_restarts": 1, "schedule": "async_1f1b"}, "on the same cuts; drop either"),
        ({"min_ranks": 1, "max_restarts": 1, "nodes": 2, "master": "a:1"}, "does not go with nodes=2"),
    ],
)  # fmt: skip
def test_what_cannot_be_restarted_is_refused(more, said):
    with pytest.raises(ConfigError) as refused:
        TrainConfig(checkpoint=CheckpointConfig(every=1), **more)
    assert said in str(refused.value)


def test_a_launcher_restarts_its_own_ranks(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert penstock(f"{JOB} max_restarts=1") == 2
    assert "max_restarts=1 is for ranks that penstock starts; tell the launcher" in capfd.readouterr().err
    assert penstock(f"{JOB} replicas.count=2 replicas.shrink=true") == 2
    assert "replicas.shrink=true is for ranks that penstock starts" in capfd.readouterr().err
