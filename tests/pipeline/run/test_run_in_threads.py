"""``replicas.threads=true``: a run whose ranks are threads leaves what one of processes does."""

import json
import re
import threading
from pathlib import Path

import pytest
from faults import ended, started
from reference import same_bits
from safetensors.torch import load_file

from penstock.compression.errors import ConfigError
from penstock.conf.parts import ReplicasConfig
from penstock.conf.schema import TrainConfig
from penstock.scripts import command

JOB = (
    "model=mlp model.hidden=[16,12] data.size=8 data.channels=1 batch_size=200 micro_batches=4 max_steps=8"
    " optimizer.momentum=0.5 scheduler=cosine epochs=2 seed=3 threads=1 checkpoint.every=2 codec=zero_value"
)
THREADS = f"{JOB} replicas.threads=true"


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def penstock(typed):
    assert command.run(["train", *typed.split()]) == 0
    assert [t.name for t in threading.enumerate() if t.name.startswith(("rank", "penstock"))] == []


def losses(folder):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def same_run(ours, theirs):
    a, b = (load_file(f"{folder}/model.safetensors") for folder in (ours, theirs))
    return losses(ours) == losses(theirs) and a.keys() == b.keys() and all(same_bits(a[n], b[n]) for n in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of one rank."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    penstock(f"{JOB} ranks=1 stages=2 hydra.run.dir={folder}")
    return folder


@pytest.mark.parametrize(
    "ranks",
    [
        "ranks=2",
        "ranks=2 replicas.count=2 replicas.exact=true",
        "ranks=3 replicas.count=[2,1] replicas.exact=true schedule=gpipe",
    ],
)
def test_threads_train_to_the_bits_of_one_rank(ranks, whole):
    penstock(f"{THREADS} {ranks} hydra.run.dir=run")
    assert same_run("run", whole)
    assert json.loads(Path("run/summary.json").read_text())["ranks"] == int(ranks[6])
    left = {path.name for path in Path("run").iterdir()}
    assert {"plan.json", "config.yaml", "timeline.png", "checkpoints"} <= left


def test_a_run_in_threads_goes_on_with_others(whole):
    penstock(f"{THREADS} ranks=3 replicas.count=[2,1] replicas.exact=true hydra.run.dir=first")
    (middle,) = Path("first/checkpoints").glob("*6")
    several = "ranks=2 replicas.count=2 replicas.exact=true"
    penstock(f"{THREADS} {several} resume={middle} hydra.run.dir=second")
    assert losses("second") == losses(whole)[6:]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ranks": 1}, "replicas.threads=true gives each rank a thread, found ranks=1; raise ranks"),
        (
            {"ranks": 2, "nodes": 2, "master": "a:1"},
            "ranks into one process, found nodes=2",
        ),
        (
            {"ranks": 2, "max_restarts": 1},
            "are lost together, so none is started again",
        ),
    ],
)
def test_what_threads_cannot_be_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        TrainConfig(replicas=ReplicasConfig(threads=True), **options)


def test_a_launcher_and_threads_are_refused_together(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert command.run(["train", *f"{THREADS} ranks=2".split()]) == 2
    assert "replicas.threads=true is for ranks that penstock starts" in capfd.readouterr().err


@pytest.mark.slow
def test_an_error_in_a_thread_is_told_by_rank_and_place_and_leaves_its_traceback(tmp_path):
    more = "ranks=2 replicas.threads=true hydra.run.dir=run"
    code, out, error, seconds = ended(started(tmp_path, more, fault="0 update 5 raise"))
    assert code == 2, out + error
    found = re.fullmatch(
        r"penstock: rank (\d), stage \1, update, step 2: ValueError: sky; its traceback is in (\S+)\n", error
    )
    assert found, error
    assert Path(found[2]).name == f"rank{found[1]}.json"
    assert "raise ValueError" in (tmp_path / found[2]).read_text()
    assert seconds < 100
