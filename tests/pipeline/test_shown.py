"""What ``print`` says of a pipeline, of a step and of an offload: a few lines for people, literally."""

from __future__ import annotations

import dataclasses
import re

import torch
from torch import nn

import penstock
from penstock.pipeline.runtime.report import Report, StageReport, described


def test_a_report_says_what_a_step_did_stage_by_stage():
    one = StageReport(
        rank=0,
        forward_raw=2048,
        forward_sent=1024,
        saved_raw=4096,
        saved_kept=1024,
        peak_bytes=8192,
        compute_seconds=0.25,
        waiting_seconds=0.125,
    )
    other = StageReport(rank=1, backward_raw=2048, backward_sent=1024, peak_bytes=512, compute_seconds=0.5)
    report = Report(step=3, loss=0.25, seconds=1.5, num_samples=64, stages=(one, other))
    assert str(report).splitlines() == [
        "step 3: loss 0.2500, 64 samples in 1.500 s",
        "4 KiB between stages sent as 2 KiB (2.00x)",
        "4 KiB saved for the backward, kept as 1 KiB (4.00x)",
        "stage 0 on rank 0: computed 0.250 s, waited 0.125 s, held 8 KiB at most",
        "stage 1 on rank 1: computed 0.500 s, waited 0.000 s, held 512 B at most",
    ]
    assert repr(report) == "<Report of step 3: loss 0.2500, 1.500 s>"
    alone = dataclasses.replace(report, stages=(StageReport(),))
    assert str(alone).splitlines()[1] == "nothing was sent between stages"


def test_a_pipeline_says_its_stages_and_where_they_are():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    example = (torch.ones(2, 4),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    plan = penstock.partition(profile, cuts=["_1"], ranks=1, micro_batches=2, codec="raw")
    pipe = penstock.Pipeline(
        model, plan, loss=nn.MSELoss(), optimizer=lambda named: torch.optim.SGD(named, lr=0.1)
    )
    lines = [
        "pipeline of 2 stages on 1 rank: schedule 1f1b, 2 micro-batches, codec raw",
        "stage 0 on rank 0: 2 layers (_0 .. _1), 15 parameters",
        "stage 1 on rank 0: 1 layer (_2), 8 parameters",
        "0 steps taken",
    ]
    assert str(pipe).splitlines() == lines
    assert repr(pipe) == "<pipeline of 2 stages on 1 rank: schedule 1f1b, rank 0>"
    report = pipe.step(torch.ones(4, 4), torch.zeros(4, 2))
    assert str(pipe).splitlines()[-1] == "1 step taken"
    assert re.fullmatch(r"step 0: loss \d\.\d{4}, 4 samples in \d+\.\d{3} s", str(report).splitlines()[0])
    pipe.close()
    two = dataclasses.replace(plan, stages=(plan.stages[0], dataclasses.replace(plan.stages[1], ranks=(1,))))
    assert described(two, here=[1], num_steps=7).splitlines()[1:] == [
        "stage 0 on rank 0: 2 layers (_0 .. _1), 15 parameters",
        "stage 1 on rank 1, here: 1 layer (_2), 8 parameters",
        "7 steps taken",
    ]


def test_an_offload_says_what_left_and_came_back():
    weight = torch.ones(1, requires_grad=True)
    with penstock.offload(codec="zero_value", min_bytes=1) as saved:
        assert str(saved) == "offload: nothing has left yet; run a forward inside its block"
        loss = (torch.zeros(1 << 20) * weight).sum()
    assert str(saved) == "offload: 4 MiB saved, kept as 130 KiB (31.49x), 1 packed, 0 brought back"
    loss.backward()
    assert str(saved).endswith("1 packed, 1 brought back")
    assert repr(saved) == f"<{saved}>"
