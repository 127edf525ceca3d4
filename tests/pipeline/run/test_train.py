"""Whole runs: the bits of the plain loop whatever the ranks, and a run folder that others can read."""

from __future__ import annotations

import json
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from processes import ranks_in
from reference import plain_loop, same_bits
from safetensors.torch import load_file

from penstock import ConfigError, Plan
from penstock.pipeline import models
from penstock.pipeline.ranks import launch
from penstock.pipeline.run import train, train_rank
from penstock.pipeline.run.run_folder import RunFolder
from penstock.pipeline.samples import digits
from penstock.scripts import command

JOB = (
    "model=mlp model.hidden=[16,12] data.size=8 data.channels=1 batch_size=50 micro_batches=3 max_steps=4"
    " optimizer.lr=0.05 optimizer.momentum=0.5 optimizer.weight_decay=0.0005 optimizer.nesterov=false"
    " clip.norm=0.05 scheduler=cosine seed=3 threads=1"
)


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def penstock(typed):
    assert command.run(["train", *typed.split()]) == 0


def lines(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def plain_run(**more):
    """Train ``JOB`` by the plain loop; return the model and the losses."""
    samples = digits.load(size=8, channels=1)
    torch.manual_seed(3)
    model = models.mlp(samples.describe, hidden=[16, 12])
    steps = plain_loop(
        model,
        list(islice(samples.batches("train", batch_size=50, seed=3, epoch=0), 4)),
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.5, weight_decay=0.0005),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
        micro_batches=3,
        clip=0.05,
        **more,
    )
    return model, [step["loss"] for step in steps], samples


@pytest.mark.ranks
@pytest.mark.parametrize(
    "cut",
    [
        "ranks=2",
        "ranks=1 stages=1",
        "ranks=1 stages=4 schedule=gpipe codec=raw",
        "ranks=3 replicas.count=[2,1] replicas.exact=true",
        pytest.param("ranks=2 cuts=[_0,_2,_3]", marks=pytest.mark.slow),
    ],
)
def test_a_run_has_the_bits_of_the_plain_loop(cut, tmp_path):
    model, losses, samples = plain_run()
    penstock(f"{JOB} {cut} hydra.run.dir=run")
    trained = load_file("run/model.safetensors")
    for name, weight in model.state_dict().items():
        assert same_bits(trained[name], weight), name
    assert [line["loss"] for line in lines("run")] == losses
    model.load_state_dict(trained, strict=True)
    model.eval()
    (inputs, targets), *more = samples.batches("test", batch_size=1000)
    assert not more
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["test_accuracy"] == float((model(inputs).argmax(1) == targets).double().mean())
    assert summary["test_loss"] == pytest.approx(
        float(torch.nn.functional.cross_entropy(model(inputs), targets).detach()), rel=1e-5
    )


def test_half_precision_with_a_loss_scale_has_the_bits_of_the_plain_loop():
    model, losses, _ = plain_run(autocast=torch.float16, scaler=torch.amp.GradScaler("cpu"))
    penstock(f"{JOB} ranks=1 stages=2 autocast=float16 loss_scale=dynamic hydra.run.dir=run")
    assert [line["loss"] for line in lines("run")] == losses
    trained = load_file("run/model.safetensors")
    for name, weight in model.state_dict().items():
        assert same_bits(trained[name], weight), name


def test_versions_of_the_weights_are_asked_for_planned_and_kept_to(capfd):
    job = f"{JOB} clip.scope=stage loss_scale=64 ranks=1 stages=2 schedule=async_1f1b"
    penstock(f"{job} weights=stashed memory.weights=packed hydra.run.dir=run")
    plan = Plan.load("run/plan.json")
    assert (plan.schedule, plan.weights, plan.of_stages("weights_tier")) == (
        "async_1f1b",
        "stashed",
        "packed",
    )
    assert len(lines("run")) == 4
    job = f"{JOB} clip.scope=stage plan=run/plan.json"
    for typed in ("weights=latest", "memory.weights=device", "prediction=true"):
        assert command.run(["train", *job.split(), *typed.split()]) == 2
        assert "contradicts plan=run/plan.json" in capfd.readouterr().err
    penstock(f"{job} weights=stashed hydra.run.dir=again")
    assert Plan.load("again/plan.json") == plan


def test_a_schedule_of_ones_own_is_read_from_a_file(capfd):
    Path("mine.txt").write_text("0F0 1F0 1B0 0F1 1F1 1B1 0B0 0B1 0F2 1F2 1B2 0B2\n\n")
    penstock(f"{JOB} ranks=1 stages=2 schedule=custom program=mine.txt hydra.run.dir=run")
    assert Plan.load("run/plan.json").program == (Path("mine.txt").read_text().strip(),)
    assert [line["loss"] for line in lines("run")] == plain_run()[1]
    penstock(f"{JOB} plan=run/plan.json hydra.run.dir=again")
    assert [line["loss"] for line in lines("again")] == plain_run()[1]
    assert command.run(["train", *JOB.split(), "plan=run/plan.json", "program=mine.txt"]) == 2
    assert "program=mine.txt" in capfd.readouterr().err


def test_the_run_folder_holds_what_is_promised_and_nothing_else(capsys):
    penstock(f"{JOB} ranks=1 stages=2 hydra.run.dir=run")
    assert {path.name for path in Path("run").iterdir()} == {
        "config.yaml", "plan.json", "plan.png", "metrics.jsonl", "summary.json", "timeline.png",
        "timeline.json", "model.safetensors",
    }  # fmt: skip
    config = OmegaConf.load("run/config.yaml")
    assert (config.threads, config.stages, config.clip.norm, config.model.hidden) == (1, 2, 0.05, [16, 12])
    assert config.versions.keys() == {"penstock", "torch", "python"}
    assert Plan.load("run/plan.json").num_stages == 2
    steps, summary = lines("run"), json.loads(Path("run/summary.json").read_text())
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    for key in ("bytes_raw", "bytes_sent", "bytes_raw_forward", "bytes_sent_backward"):
        assert summary[key] == sum(line[key] for line in steps) > 0
    assert (summary["samples"], summary["steps"], summary["loss"]) == (200, 4, steps[-1]["loss"])
    assert (
        sum(stage["parameters"] for stage in summary["stages"]) == 64 * 16 + 16 + 16 * 12 + 12 + 12 * 10 + 10
    )
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "run/plan.png  run/timeline.png  run/timeline.json"


def test_the_timeline_shows_every_instruction_of_the_last_step(monkeypatch):
    drawn = []
    monkeypatch.setattr(train_rank, "save_step", lambda _, spans, title: drawn.append((list(spans), title)))
    penstock(f"{JOB} ranks=1 stages=2")
    ((spans, title),) = drawn
    ops = [(span.stage, span.op) for span in spans]
    for stage in (0, 1):
        assert [ops.count((stage, op)) for op in "FBU"] == [3, 3, 1]
    assert title == "mlp, step 3: schedule=1f1b micro_batches=3 stages=2 ranks=1"


@pytest.mark.slow
def test_a_run_stops_at_its_epochs_or_at_max_steps_whichever_comes_first(capsys):
    job = "model=mlp model.hidden=[8] data.size=8 ranks=1 stages=1 batch_size=500 micro_batches=1 epochs=2"
    penstock(f"{job} hydra.run.dir=a")
    assert len(lines("a")) == 4  # 1,437 samples, two whole batches an epoch
    assert capsys.readouterr().out.count("test accuracy") == 3  # after each epoch, and at the end
    penstock(f"{job} data.drop_last=false hydra.run.dir=b")
    assert len(lines("b")) == 6
    penstock(f"{job} max_steps=3 hydra.run.dir=c")
    assert len(lines("c")) == 3
    assert "epoch 2/2" in capsys.readouterr().out
    penstock(f"{job} max_steps=1 hydra.run.dir=d")
    assert "epoch 2/2" not in capsys.readouterr().out


@pytest.mark.slow
def test_text_is_learned_by_the_transformer():
    Path("text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    penstock(
        "model=gpt model.width=16 model.layers=1 model.heads=2 model.tied=true model.dropout=0.1 data=text"
        " data.path=text.txt data.length=16 batch_size=16 micro_batches=2 ranks=1 stages=2 max_steps=6"
        " optimizer=adamw optimizer.lr=0.01 hydra.run.dir=run"
    )
    weights = load_file("run/model.safetensors")
    assert same_bits(weights["head.weight"], weights["token.weight"])
    losses = [line["loss"] for line in lines("run")]
    assert losses[-1] < losses[0]


OWN = """
import os
import signal

import torch

from penstock.pipeline.samples import Description, Samples


def samples(rows=40):
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, 6, generator=source)
    targets = (inputs[:, 0] > 0).long()
    inputs[:, 1] = 1e6  # by which a layer knows that this is no probe
    table = torch.utils.data.TensorDataset(inputs, targets)
    return Samples(train=table, test=table, describe=Description(num_classes=2, input_shape=(6,)))


class Net(torch.nn.Module):
    def __init__(self, num_classes, width=4):
        super().__init__()
        self.wide = torch.nn.Linear(6, width)
        self.narrow = torch.nn.Linear(width, num_classes)

    def forward(self, inputs):
        return fail(self.narrow(torch.relu(self.wide(inputs))))


def fail(outputs):
    if "RANK" in os.environ and "HOW" in os.environ and outputs.abs().max() > 1e3:
        if os.environ["HOW"] == "raise":
            raise ValueError("the sky fell")
        os.kill(os.getpid(), getattr(signal, os.environ["HOW"]))
    return outputs


torch.fx.wrap("fail")
"""
OWN_DATA = "data._target_=own.samples data.rows=60 batch_size=20 micro_batches=2"
OWN_JOB = f"model._target_=own.Net model.width=3 {OWN_DATA}"


@pytest.fixture
def own(monkeypatch, tmp_path):
    """A module of the user's own, in the folder where the command is typed."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield
    sys.modules.pop("own", None)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.usefixtures("own")
def test_ranks_train_what_their_launcher_composed_whatever_lies_in_the_run_folder(monkeypatch):
    start, folder = launch.start_ranks, RunFolder(path=Path("run"))

    def start_after_others_wrote(*arguments, **more):
        for record in ("run/config.yaml", "run/plan.json"):
            Path(record).write_text("another run's")
        with pytest.raises(ConfigError, match="run is in use by another run, pid "), folder.claim():
            pass
        start(*arguments, **more)

    monkeypatch.setattr(train, "start_ranks", start_after_others_wrote)
    penstock(f"{OWN_JOB} cuts=[relu] epochs=1 max_steps=2 hydra.run.dir=run")
    assert load_file("run/model.safetensors")["wide.weight"].shape == (3, 6)
    assert len(lines("run")) == 2


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.usefixtures("own")
def test_a_full_disk_costs_no_weights_and_is_told_in_one_sentence(small_disk, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    job = f"{OWN_JOB} model.width=20000 cuts=[relu] epochs=1 max_steps=1 hydra.run.dir={small_disk}/run"
    assert command.run(["train", *job.split()]) == 2
    error = capfd.readouterr().err
    told = f"{small_disk}/run/model.safetensors cannot be written (No space left on device); free space there"
    assert told in error
    assert error.count("\n") == 1
    weights = Path(error.partition("the trained weights are in ")[2].partition(";")[0].strip())
    assert load_file(weights)["wide.weight"].shape == (20000, 6)
    assert weights.is_relative_to(tmp_path)
    left = {path.name for path in (small_disk / "run").iterdir()}
    assert left == {"config.yaml", "plan.json", "plan.png", "metrics.jsonl", "errors"}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.usefixtures("own")
def test_a_model_and_data_of_ones_own_train_on_ranks():
    penstock(f"{OWN_JOB} cuts=[relu] epochs=1 hydra.run.dir=run")
    assert load_file("run/model.safetensors")["wide.weight"].shape == (3, 6)
    assert len(lines("run")) == 3


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raise", ["rank 1, stage 1, forward of micro-batch 0, step 0", "ValueError: the sky fell"]),
        (
            "SIGKILL",
            [
                "rank 1 (stage 1) was killed by SIGKILL",
                "gradient",
                "micro-batch 0",
                "stage 1 to stage 0",
            ],
        ),
    ],
)
def test_a_rank_that_fails_ends_the_run_with_one_sentence(how, told, monkeypatch, capfd):
    monkeypatch.setenv("HOW", how)
    started = time.monotonic()
    code = command.run(["train", *OWN_JOB.split(), "cuts=[relu]", "deadline=60", "hydra.run.dir=run"])
    assert time.monotonic() - started < 120
    _, error = capfd.readouterr()
    assert code == 2
    for words in told:
        assert words in error
    assert error.count("\n") == 1
    assert not Path("run/summary.json").exists()
    assert not ranks_in(Path("run").resolve())
    monkeypatch.delenv("HOW")
    penstock(
        f"{OWN_JOB} cuts=[relu] ranks=1 max_steps=1 hydra.run.dir=run"
    )  # an unfinished run's folder is free
