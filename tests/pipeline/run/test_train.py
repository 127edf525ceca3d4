"""Whole runs: the bits of the plain loop whatever the ranks, and a run folder that others can read."""

import argparse
import functools
import os
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import OWN, SMALL, lines, losses, refusal, same_run, summary, trained
from devices import Noting
from omegaconf import OmegaConf
from processes import ranks_in
from reference import plain_loop, same_tree
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.utils.data import default_collate

from penstock import ConfigError, Plan
from penstock.conf.schema import PlanConfig, TrainConfig
from penstock.pipeline import models
from penstock.pipeline.data import digits
from penstock.pipeline.data.samples import samples_of
from penstock.pipeline.distributed import launcher
from penstock.pipeline.run import determinism, planning, train, training_loop
from penstock.pipeline.run.losses import of_model
from penstock.pipeline.run.run_folder import RunFolder
from penstock.scripts import command

JOB = (
    f"{SMALL} batch_size=50 micro_batches=3 max_steps=4 optimizer.lr=0.05 optimizer.momentum=0.5"
    " optimizer.weight_decay=0.0005 optimizer.nesterov=false clip.norm=0.05 scheduler=cosine"
)
ALONE = f"{JOB} ranks=1 stages=2"


def plain_run(loss=F.cross_entropy, **more):
    """Train ``JOB`` by the plain loop; return the model and the losses."""
    samples = digits.load(size=8, channels=1)
    torch.manual_seed(3)
    model = models.mlp(samples.describe, hidden=[16, 12])
    steps = plain_loop(
        model,
        list(islice(samples.batches("train", batch_size=50, seed=3, epoch=0), 4)),
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.05, momentum=0.5, weight_decay=0.0005),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4),
        micro_batches=3,
        clip=0.05,
        **more,
    )
    return model, [step["loss"] for step in steps], samples


def check_bits(folder, model, losses):
    assert same_tree(load_file(f"{folder}/model.safetensors"), dict(model.state_dict()))
    assert [line["loss"] for line in lines(folder)] == losses


@pytest.mark.ranks
@pytest.mark.parametrize(
    "cut",
    [
        "ranks=2 cuts=[_0,_2,_3]",
        "ranks=3 replicas.count=[2,1] replicas.exact=true",
        pytest.param("ranks=1 stages=1", marks=pytest.mark.slow),
    ],
)
def test_a_run_has_the_bits_of_the_plain_loop(cut):
    model, losses, samples = plain_run()
    trained(f"{JOB} {cut} hydra.run.dir=run")
    check_bits("run", model, losses)
    model.eval()
    (inputs, targets), *more = samples.batches("test", batch_size=1000)
    assert not more
    found = summary("run")
    assert found["test_accuracy"] == float((model(inputs).argmax(1) == targets).double().mean())
    assert found["test_loss"] == pytest.approx(
        float(torch.nn.functional.cross_entropy(model(inputs), targets).detach()), rel=1e-5
    )


def test_half_precision_with_a_loss_scale_has_the_bits_of_the_plain_loop():
    model, losses, _ = plain_run(autocast=torch.float16, scaler=torch.amp.GradScaler("cpu"))
    trained(f"{ALONE} autocast=float16 loss_scale=dynamic hydra.run.dir=run")
    check_bits("run", model, losses)


@pytest.mark.parametrize(
    ("option", "loss"),
    [
        ("_target_=torch.nn.functional.multi_margin_loss loss.p=2", {"p": 2}),
        ("_target_=torch.nn.CrossEntropyLoss loss.label_smoothing=0.1", {"label_smoothing": 0.1}),
        ("label_smoothing=0.1", {"label_smoothing": 0.1}),
    ],
)
def test_another_loss_has_the_bits_of_the_plain_loop(option, loss):
    function = F.multi_margin_loss if "p" in loss else F.cross_entropy
    trained(f"{ALONE} loss.{option} hydra.run.dir=run")
    check_bits("run", *plain_run(loss=functools.partial(function, **loss))[:2])


def test_the_loss_that_a_model_returns_is_trained_and_tested():
    Path("own.py").write_text(LABELLED)
    trained(f"{PLAIN} data._target_=own.rows loss=model hydra.run.dir=run")
    import own  # pyright: ignore[reportMissingImports]

    model, (_, tests), found = own.Net(), own.rows(), summary("run")
    model.load_state_dict(load_file("run/model.safetensors"))
    wanted = model(**default_collate([*tests]))["loss"].detach()
    assert (found["test_loss"], "test_accuracy" in found) == (pytest.approx(float(wanted), rel=1e-5), False)
    for returned in (wanted, (wanted, 1), {"loss": wanted}, argparse.Namespace(loss=wanted)):
        assert of_model(returned, None) is wanted
    for returned in (wanted[None], (), {"logits": wanted}, None):
        with pytest.raises(ConfigError, match="loss=model takes the mean loss, a number"):
            of_model(returned, None)


LABELLED = """
import torch
from torch import nn
from torch.utils.data import Subset


def rows():
    inputs = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    table = [{"x": x, "labels": (x[0] > 0).long()} for x in inputs]
    return Subset(table, range(40)), Subset(table, range(40, 50))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x, labels):
        scores = self.b(self.a(x).relu())
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores}
"""


def test_versions_of_the_weights_are_asked_for_planned_and_kept_to(capfd):
    job = f"{ALONE} clip.scope=stage loss_scale=64 schedule=async_1f1b"
    trained(f"{job} weights=stashed memory.weights=packed hydra.run.dir=run")
    plan = Plan.load("run/plan.json")
    found = plan.schedule, plan.weights, plan.of_stages("weights_tier")
    assert found == ("async_1f1b", "stashed", "packed")
    assert len(lines("run")) == 4
    job = f"{JOB} clip.scope=stage plan=run/plan.json"
    assert "contradicts plan=run/plan.json" in refusal(f"{job} memory.weights=device", capfd)
    trained(f"{job} weights=stashed hydra.run.dir=again")
    assert Plan.load("again/plan.json") == plan


def test_the_run_folder_holds_what_is_promised_and_the_timeline_every_instruction(capsys, monkeypatch):
    drawn, save = [], planning.save_step

    def save_step(folder, plan, panel, spans, *, title):
        drawn.append((list(spans), title))
        save(folder, plan, panel, spans, title=title)

    monkeypatch.setattr(training_loop, "save_step", save_step)
    trained(f"{ALONE} hydra.run.dir=run")
    assert {path.name for path in Path("run").iterdir()} == {
        "config.yaml", "plan.json", "plan.png", "metrics.jsonl", "summary.json", "timeline.png",
        "timeline.json", "model.safetensors", "starts.jsonl",
    }  # fmt: skip
    config = OmegaConf.load("run/config.yaml")
    assert (config.threads, config.stages, config.clip.norm, config.model.hidden) == (1, 2, 0.05, [16, 12])
    assert config.versions.keys() == {"penstock", "torch", "python"}
    assert Plan.load("run/plan.json").num_stages == 2
    steps, found = lines("run"), summary("run")
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    for key in ("bytes_raw", "bytes_sent", "bytes_raw_forward", "bytes_sent_backward"):
        assert found[key] == sum(line[key] for line in steps) > 0
    assert (found["samples"], found["steps"], found["loss"]) == (200, 4, steps[-1]["loss"])
    assert sum(stage["parameters"] for stage in found["stages"]) == 65 * 16 + 17 * 12 + 13 * 10
    told = found["prediction"]
    assert min(*told["step_seconds"], *(min(stage["compute"]) for stage in told["stages"])) > 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "run/plan.png  run/timeline.png  run/timeline.json"
    ((spans, title),) = drawn
    ops = [(span.stage, span.op) for span in spans]
    for stage in (0, 1):
        assert [ops.count((stage, op)) for op in "FBU"] == [3, 3, 1]
    assert title == "mlp, step 3: schedule=1f1b micro_batches=3 stages=2 ranks=1"


OWN_JOB = (
    "model._target_=own.Net model.width=3 data._target_=own.samples data.rows=60 batch_size=20"
    " micro_batches=2 cuts=[relu] epochs=1"
)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("data.labels=float", "takes labels of int64, found float32 of shape (20,) in the first batch"),
        ("data.labels=large model.num_classes=2", "are 0 to 1, or -100 for none, found 9 in sample"),
    ],
)
def test_labels_that_the_loss_does_not_take_are_refused_before_the_model_is_recorded(more, said, capfd):
    Path("own.py").write_text(OWN.replace("def forward", "def never"))
    assert said in refusal(f"{OWN_JOB} ranks=1 {more} hydra.run.dir=run", capfd)


@pytest.mark.parametrize(
    ("result", "more", "said"),
    [
        (
            "{'logits': y}",
            "",
            "the model returns a dict; where it computes its loss itself, write loss=model",
        ),
        ("y", "data.labels=large", "labels of 2 classes are 0 to 1, or -100 for none, found 9 in sample"),
    ],
)
def test_what_the_loss_does_not_take_of_the_model_is_refused_before_ranks_start(result, more, said, capfd):
    text = OWN.replace(
        "return self.narrow(torch.relu(self.wide(inputs)))",
        f"y = self.narrow(torch.relu(self.wide(inputs)))\n        return {result}",
    )
    Path("own.py").write_text(text)
    assert said in refusal(f"{OWN_JOB} {more} hydra.run.dir=run", capfd)


@pytest.mark.slow
@pytest.mark.ranks
def test_ranks_train_what_their_launcher_composed_whatever_lies_in_the_run_folder(monkeypatch):
    Path("own.py").write_text(OWN)
    start, folder = launcher.start_ranks, RunFolder(path=Path("run"))

    def start_after_others_wrote(*arguments, **more):
        for record in ("run/config.yaml", "run/plan.json"):
            Path(record).write_text("another run's")
        with pytest.raises(ConfigError, match="run is in use by another run, pid "), folder.claim():
            pass
        start(*arguments, **more)

    monkeypatch.setattr(train, "start_ranks", start_after_others_wrote)
    trained(f"{OWN_JOB} hydra.run.dir=run")
    assert load_file("run/model.safetensors")["wide.weight"].shape == (3, 6)
    assert len(lines("run")) == 3
    assert not ranks_in(Path("run").resolve())


@pytest.mark.ranks
def test_a_full_disk_costs_no_weights_and_is_told_in_one_sentence(small_disk, tmp_path, monkeypatch, capfd):
    Path("own.py").write_text(OWN)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    job = f"train {OWN_JOB} model.width=20000 max_steps=1 hydra.run.dir={small_disk}/run"
    assert command.run(job.split()) == 2  # by ranks that are truly started
    error = capfd.readouterr().err
    told = f"{small_disk}/run/model.safetensors cannot be written (No space left on device); free space there"
    assert told in error
    assert error.count("\n") == 1
    weights = Path(error.partition("the trained weights are in ")[2].partition(";")[0].strip())
    assert load_file(weights)["wide.weight"].shape == (20000, 6)
    assert weights.is_relative_to(tmp_path)
    left = {path.name for path in (small_disk / "run").iterdir()}
    assert left == {"config.yaml", "plan.json", "plan.png", "metrics.jsonl", "starts.jsonl", "errors"}


CHECKED = (
    f"{SMALL} batch_size=200 micro_batches=4 max_steps=8 optimizer.momentum=0.5 scheduler=cosine epochs=2"
    " checkpoint.every=2 codec=zero_value"
)
THREADED = f"{CHECKED} replicas.threads=true"


def test_threads_train_to_the_bits_of_one_rank_and_go_on_with_others():
    trained(f"{CHECKED} ranks=1 stages=2 hydra.run.dir=whole")
    trained(f"{THREADED} ranks=3 replicas.count=[2,1] replicas.exact=true schedule=gpipe hydra.run.dir=run")
    assert [t.name for t in threading.enumerate() if t.name.startswith(("rank", "penstock"))] == []
    assert same_run("run", "whole")
    assert summary("run")["ranks"] == 3
    left = {path.name for path in Path("run").iterdir()}
    assert {"plan.json", "config.yaml", "timeline.png", "checkpoints"} <= left
    (middle,) = Path("run/checkpoints").glob("*6")
    trained(f"{THREADED} ranks=2 replicas.count=2 replicas.exact=true resume={middle} hydra.run.dir=second")
    assert losses("second") == losses("whole")[6:]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_nan_in_the_data_is_told_by_the_rank_that_found_it_with_input_and_layer(ranks, capfd):
    Path("own.py").write_text(OWN)
    job = "model._target_=own.Net data._target_=own.samples data.nans=true batch_size=20 micro_batches=2"
    options = f"cuts=[relu] threads=1 detect_anomaly=true ranks={ranks} deadline=60 hydra.run.dir=run"
    told = refusal(f"{job} {options}", capfd)
    assert not Path("run/model.safetensors").exists()
    assert "rank 0, stage 0, forward of micro-batch 0, step 0: detect_anomaly=true refuses NaN" in told
    assert "of that of layer wide, NaN first in the input inputs" in told


OWN_DATA = """
import random

import numpy as np
from torch.utils.data import DataLoader, TensorDataset


def table(rows=40, seed=0):
    source = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, 6, generator=source)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long())


def one():
    return table()


def loaders():
    return DataLoader(table(), batch_size=5, shuffle=True), DataLoader(table(rows=10, seed=1))


def mixed():  # two samples in one, as mixup does, by all the generators that people draw from
    def mix(items):
        weight = random.random() * torch.rand(()) * float(np.random.rand())
        inputs, targets = torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])
        return weight * inputs + (1 - weight) * inputs.flip(0), targets if weight > 0.1 else targets.flip(0)

    return DataLoader(table(), batch_size=20, collate_fn=mix)
"""
PLAIN = (
    "model._target_=own.Net ranks=1 stages=2 batch_size=20 micro_batches=2 epochs=1 scheduler=none"
    " optimizer.lr=0.1 optimizer.momentum=0 optimizer.nesterov=false optimizer.weight_decay=0"
)


@pytest.mark.parametrize(
    ("target", "ranks"), [("loaders", 1), pytest.param("one", 2, marks=[pytest.mark.slow, pytest.mark.ranks])]
)
def test_what_people_have_trains_with_the_bits_of_the_plain_loop(target, ranks, capfd):
    Path("own.py").write_text(OWN + OWN_DATA)
    trained(f"{PLAIN.replace('ranks=1', f'ranks={ranks}')} data._target_=own.{target} hydra.run.dir=run")
    out, error = capfd.readouterr()
    assert ("test_accuracy" in summary("run")) == ("test accuracy" in out) == (target != "one")
    assert error.count("nothing to test on") == (target == "one")
    assert error.count("batch_size=5 gives way to batch_size=20") == (target == "loaders")
    import own  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    model = own.Net(2)
    steps = plain_loop(
        model,
        list(samples_of(own.one(), target="own.one", batch_size=None).batches("train", batch_size=20)),
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        micro_batches=2,
    )
    expected = [step["loss"] for step in steps]
    assert len(expected) == 2
    check_bits("run", model, expected)


@pytest.mark.slow
@pytest.mark.ranks
def test_what_samples_draw_is_the_same_on_every_rank_and_for_a_run_that_goes_on():
    """Inputs are drawn on the first rank and their targets on the last, so both must mean the same sample."""
    Path("own.py").write_text(OWN + OWN_DATA)
    job = f"{PLAIN.replace('epochs=1', 'epochs=4')} data._target_=own.mixed checkpoint.every=3"

    trained(f"{job} hydra.run.dir=alone")
    trained(f"{job.replace('ranks=1', 'ranks=2')} hydra.run.dir=two")
    assert losses("two") == losses("alone")
    trained(f"{job} hydra.run.dir=on resume=alone/checkpoints/step_00000003")
    assert losses("on") == losses("alone")[3:]


ONE_STEP = (
    "model=mlp model.hidden=[8] data.size=8 max_steps=1 batch_size=8 micro_batches=2 ranks=1 stages=2 "
    "threads=1"
)


@pytest.fixture
def on_gpu(monkeypatch):
    """A process on a GPU whose settings are put back."""
    cudnn: Any = torch.backends.cudnn
    parts: tuple[Any, ...] = (torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn)
    before = [part.fp32_precision for part in parts]
    for part in parts:
        part.fp32_precision = "tf32"
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.setattr(determinism, "place", lambda config: Noting(is_gpu=True))
    monkeypatch.setenv(determinism.WORKSPACE, "")
    monkeypatch.delenv(determinism.WORKSPACE)
    yield
    for part, precision in zip(parts, before, strict=True):
        part.fp32_precision = precision


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, ("True", ":4096:8", "False", "ieee", "ieee")),
        ({"tf32": True}, ("True", ":4096:8", "False", "tf32", "tf32")),
        ({"deterministic": False}, ("False", "", "True", "tf32", "tf32")),
    ],
)
def test_settings_are_made_as_asked_and_recorded(options, found, on_gpu):
    config = PlanConfig(**options)
    determinism.begin(config)
    names = (
        "deterministic_algorithms cublas_workspace cudnn_benchmark float32_of_matrix_products "
        "float32_of_convolutions"
    )
    held = determinism.held(config)
    assert tuple(held[name] for name in names.split()) == found
    assert os.environ.get(determinism.WORKSPACE, "") == found[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_auto_is_the_cpu_and_a_plan_whose_stage_says_cuda_is_refused(capfd):
    """Settings of GPUs alone are left as they are, and the folder records the device of the run."""
    cudnn: Any = torch.backends.cudnn
    before = cudnn.conv.fp32_precision, cudnn.benchmark
    trained(f"{ONE_STEP} hydra.run.dir=here device=auto")
    assert (cudnn.conv.fp32_precision, cudnn.benchmark) == before
    settings = OmegaConf.load("here/config.yaml").settings
    assert settings == {"device": "cpu", "deterministic_algorithms": "True"}
    plan = Path("here/plan.json").read_text()
    assert plan.count('"device": null') == 2
    Path("edited.json").write_text(plan.replace('"device": null', '"device": "cuda"'))
    options = ONE_STEP.replace("ranks=1 stages=2 ", "").replace("micro_batches=2 ", "")
    said = refusal(f"{options} plan=edited.json", capfd)
    assert "plan=edited.json: stage 0 of the plan: device=cuda needs a GPU" in said


def test_each_rank_has_the_device_that_is_listed_for_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = TrainConfig(device=["cpu", "cuda:0", "cpu"])
    found = [determinism.place(config, rank=rank).torch for rank in range(3)]
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    found.append(determinism.place(config).torch)
    assert list(map(str, found)) == ["cpu", "cuda:0", "cpu", "cuda:0"]


@pytest.mark.ranks
def test_a_list_of_devices_trains_as_one_for_all():
    trained(f"{ONE_STEP} ranks=2 hydra.run.dir=one")
    trained(f"{ONE_STEP} ranks=2 hydra.run.dir=list device=[cpu,cpu]")
    assert same_run("one", "list")


def test_a_run_gives_its_device_to_the_pipeline(on_gpu, monkeypatch):
    device = Noting(torch.device("meta"), is_gpu=True)
    monkeypatch.setattr(train, "place", lambda config, rank=None: device)
    monkeypatch.setattr(train, "Pipeline", lambda model, plan, **given: given)
    monkeypatch.setattr(train, "count_updates", lambda config, samples: 1)
    config: Any = TrainConfig(loss_scale=8.0, optimizer={"_target_": "torch.optim.SGD", "lr": 0.1})
    none: Any = None
    made: Any = train.assemble(config, none, none, none, RunFolder(path=Path("run")), world=None)
    assert made["device"] is device
