"""Ranks that are lost are started again: the same bits, said in one line, and no error is tried twice."""

import json
from pathlib import Path

import pytest
from commands import DEADLY, refusal, same_run, trained
from omegaconf import OmegaConf

from penstock.conf.schema import TrainConfig
from penstock.pipeline.distributed.failure import Lost
from penstock.pipeline.run.run_folder import RunFolder
from penstock.pipeline.run.train import persist

pytestmark = pytest.mark.ranks

JOB = f"{DEADLY} hydra.run.dir=run"
KEPT = f"{JOB} checkpoint.every=2"


def deadly(monkeypatch, *, deaths=1, victim=1, after=281, by="SIGKILL"):
    """Let rank ``victim`` die at its ``after``-th sample in as many of its starts."""
    for number in range(deaths):
        Path(f"kill_{number}").touch()
    for name, value in {"VICTIM": victim, "AFTER": after, "BY": by}.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    trained(f"{DEADLY} checkpoint.every=2 ranks=1 stages=2 hydra.run.dir={folder}")
    return folder


def restarts(capfd):
    """Messages about restarts."""
    return [line for line in capfd.readouterr().err.splitlines() if "restart" in line]


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("job", "victim", "where"),
    [
        (f"{KEPT} max_restarts=1", 1, "restart 1 of 1 goes on behind step"),
        pytest.param(f"{KEPT} data.workers=1 max_restarts=1", 1, "samples was lost", marks=slow),
        pytest.param(f"{KEPT} ranks=1 stages=2 max_restarts=2", 0, "of 2 goes on behind step", marks=slow),
    ],
)
def test_a_killed_rank_is_started_again_and_the_bits_stay(job, victim, where, whole, monkeypatch, capfd):
    deadly(monkeypatch, victim=victim)
    trained(job)
    (said,) = restarts(capfd)
    assert where in said
    if "workers" not in job:
        assert said.startswith(f"penstock: rank {victim} (stage")
        assert "was killed by SIGKILL" in said
    assert same_run("run", whole)


@pytest.mark.slow
def test_a_rank_that_dies_again_at_once_is_done_without(whole, monkeypatch, capfd):
    deadly(monkeypatch, deaths=2, after=1)
    trained(f"{KEPT} max_restarts=3 min_ranks=1 stages=2")
    assert ["with ranks=1" in line for line in restarts(capfd)] == [False, True]
    assert json.loads(Path("run/plan.json").read_text())["stages"][1]["ranks"] == [0]
    assert same_run("run", whole)


def test_a_lost_replica_is_done_without_and_the_bits_stay(whole, monkeypatch, capfd):
    deadly(monkeypatch, victim=2)
    options = "ranks=3 device=[cpu,auto,cpu] replicas.count=[1,2] replicas.exact=true replicas.shrink=true"
    trained(f"{KEPT} {options}")
    (said,) = [line for line in capfd.readouterr().err.splitlines() if "without it" in line]
    assert said.startswith("penstock: rank 2 (stage 1) was killed by SIGKILL")
    assert "; goes on behind step " in said
    assert said.endswith(", without it: replicas.count=[1, 1]")
    plan = json.loads(Path("run/plan.json").read_text())
    assert [stage["ranks"] for stage in plan["stages"]] == [[0], [1]]
    assert OmegaConf.load("run/config.yaml").device == ["cpu", "auto"]
    assert same_run("run", whole)


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


def test_an_error_of_its_own_is_not_tried_again(monkeypatch, capfd):
    deadly(monkeypatch, by="NO_SIGNAL")  # an AttributeError in the data set
    assert "AttributeError" in refusal(f"{KEPT} max_restarts=3", capfd)


@pytest.mark.parametrize(
    "option",
    [
        "max_restarts=1",
        "replicas.count=2 replicas.shrink=true",
        "replicas.threads=true",
        "ranks=2 replicas.count=auto replicas.idle=true",
    ],
)
def test_what_is_for_ranks_that_penstock_starts_is_refused_under_a_launcher(option, monkeypatch, capfd):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = refusal(f"{JOB} {option}", capfd)
    assert f"{option.split()[-1]} is for ranks that penstock" in said
