"""Settings of torch for the bits of a GPU, and their record in the run folder."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import refusal, trained
from devices import Noting
from omegaconf import OmegaConf

from penstock.conf.schema import PlanConfig, TrainConfig
from penstock.pipeline.run import determinism, train

JOB = (
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
@pytest.mark.parametrize("what", ["train", "plan"])
def test_cuda_is_refused_where_there_is_none(what, capfd):
    options = JOB if what == "train" else JOB.replace("max_steps=1 ", "")
    said = refusal(f"{options} hydra.run.dir=cuda device=cuda", capfd, name=what)
    assert "device=cuda needs a GPU, and torch" in said
    assert not Path("cuda").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_auto_is_the_cpu_and_a_plan_whose_stage_says_cuda_is_refused(capfd):
    """Settings of GPUs alone are left as they are, and the folder records the device of the run."""
    cudnn: Any = torch.backends.cudnn
    before = cudnn.conv.fp32_precision, cudnn.benchmark
    trained(f"{JOB} hydra.run.dir=here device=auto")
    assert (cudnn.conv.fp32_precision, cudnn.benchmark) == before
    settings = OmegaConf.load("here/config.yaml").settings
    assert settings == {"device": "cpu", "deterministic_algorithms": "True"}
    plan = Path("here/plan.json").read_text()
    assert plan.count('"device": null') == 2
    Path("edited.json").write_text(plan.replace('"device": null', '"device": "cuda"'))
    options = JOB.replace("ranks=1 stages=2 ", "").replace("micro_batches=2 ", "")
    said = refusal(f"{options} plan=edited.json", capfd)
    assert "plan=edited.json: stage 0 of the plan: device=cuda needs a GPU" in said


def test_a_run_gives_its_device_to_the_pipeline(on_gpu, monkeypatch):
    device = Noting(torch.device("meta"), is_gpu=True)
    monkeypatch.setattr(train, "place", lambda config, local=None: device)
    monkeypatch.setattr(train, "Pipeline", lambda model, plan, **given: given)
    monkeypatch.setattr(train, "count_updates", lambda config, samples: 1)
    config: Any = TrainConfig(loss_scale=8.0, optimizer={"_target_": "torch.optim.SGD", "lr": 0.1})
    made: Any = train.assemble(config, *([None] * 3))  # pyright: ignore[reportArgumentType]
    assert made["device"] is device
