"""``replicas.threads=true``: a run whose ranks are threads of its process leaves what one of processes does."""

import json
import threading
from pathlib import Path

import pytest
import torch
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
    before = torch.get_rng_state()
    penstock(f"{THREADS} {ranks} hydra.run.dir=run")
    assert same_run("run", whole)
    assert same_bits(torch.get_rng_state(), before) or "mlp" not in ranks
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["ranks"] == int(ranks[6])
    assert {"plan.json", "config.yaml", "timeline.png", "checkpoints"} <= {
        p.name for p in Path("run").iterdir()
    }


def test_a_run_in_threads_goes_on_with_others(whole):
    several = "ranks=3 replicas.count=[2,1] replicas.exact=true"
    penstock(f"{THREADS} {several} max_steps=4 hydra.run.dir=first")
    penstock(f"{THREADS} ranks=2 replicas.count=2 replicas.exact=true resume=first hydra.run.dir=second")
    assert losses("second") == losses(whole)[4:]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ranks": 1}, "replicas.threads=true gives each rank a thread, found ranks=1; raise ranks"),
        (
            {"ranks": 2, "nodes": 2, "master": "a:1"},
            "puts all ranks into one process, found nodes=2; drop either",
        ),
        (
            {"ranks": 2, "max_restarts": 1},
            "are lost together, so none is started again, found replicas.threads",
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
    assert "replicas.threads=true puts all ranks into one process, and a launcher" in capfd.readouterr().err


OWN = """
import signal, os, threading
import torch
from penstock.pipeline.samples import Description, Samples

seen = []

class Gate(torch.nn.Module):
    def forward(self, x):
        if self.training and threading.current_thread().name == "rank1":
            seen.append(1)
            if len(seen) == {count}:
                {act}
        return x

def net(**_):
    first, second = torch.nn.Linear(16, 8), torch.nn.Linear(8, 10)
    return torch.nn.Sequential(torch.nn.Flatten(), first, torch.nn.ReLU(), Gate(), second)
"""
OWN_JOB = (
    "model._target_={name}.net model.leaves=[Gate] data=fake data.shape=[4,4] batch_size=20 micro_batches=2"
    " max_steps=40 threads=1 replicas.threads=true ranks=2 cuts=[_1] deadline=30 hydra.run.dir=run"
)
