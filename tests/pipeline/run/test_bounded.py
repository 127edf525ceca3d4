"""Processes under a budget: none has the whole model, and what is freed goes back to the system."""

import contextlib
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import OWN, SMALL, same_run, trained
from ranks import ForkedRank

from penstock.pipeline.run import bounded
from penstock.scripts import command
from penstock.stages.plan.plan import Plan

JOB = f"{SMALL} batch_size=50 micro_batches=3 max_steps=3 codec=raw optimizer.momentum=0.5"
ODD = """
import torch
from own import Net


class ReadsItself(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.scale = float(self.wide.weight.detach().mean())


class Draws(Net):
    def __init__(self, num_classes):
        super().__init__(num_classes)
        self.shift = torch.rand(1).item()

    def forward(self, inputs):
        return super().forward(inputs) + self.shift
"""


@pytest.fixture
def started(monkeypatch):
    """Run a command, for which a small model is large; the modules of the processes that it starts."""
    monkeypatch.setattr(bounded, "LEAST_BYTES", 0)
    modules = []

    def start(line, environment):
        modules.append(line[4])
        return ForkedRank(line, environment)

    return lambda typed: (command.run(["train", *typed.split()], start_process=start), modules)


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_in_which_no_process_makes_the_whole_model_has_the_same_bits(started, ranks):
    job = f"{JOB} ranks={ranks}"
    trained(f"{job} hydra.run.dir=whole")
    code, modules = started(f"{job} hydra.run.dir=bounded memory.parameters=disk")
    assert code == 0
    assert modules == [bounded.__name__, *["penstock.pipeline.run.train"] * (ranks if ranks > 1 else 0)]
    assert same_run("whole", "bounded")
    assert not Path("bounded/first_values.safetensors").exists()
    assert "first_values" not in Path("bounded/config.yaml").read_text()


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["ReadsItself", "Draws"])
def test_a_model_that_is_another_without_values_is_made_whole(started, name, capsys, monkeypatch):
    Path("own.py").write_text(OWN)
    Path("odd.py").write_text(ODD)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    job = f"model._target_=odd.{name} data._target_=own.samples seed=3 threads=1 ranks=1 stages=2 max_steps=2"
    job += " batch_size=20 codec=raw"
    trained(f"{job} hydra.run.dir=whole")
    code, _ = started(f"{job} hydra.run.dir=bounded memory.parameters=disk")
    assert code == 0
    assert "every process of this run makes the whole model first" in re.sub(
        r"\s+", " ", capsys.readouterr().err
    )
    assert same_run("whole", "bounded")


def held_by_ranks(typed):
    """Type ``penstock train``; return the most anonymous and shared memory of each rank, in bytes."""
    most: dict[str, int] = {}
    with subprocess.Popen([sys.executable, "-m", "penstock", "train", *typed.split()]) as run:
        while run.poll() is None:
            for children in Path("/proc").glob(f"{run.pid}/task/*/children"):
                for child in map(Path("/proc").joinpath, children.read_text().split()):
                    with contextlib.suppress(OSError):  # it has ended
                        if b"penstock.pipeline.run.train" in (child / "cmdline").read_bytes():
                            most[child.name] = max(most.get(child.name, 0), held_by(child))
            time.sleep(0.02)
    assert run.returncode == 0
    assert len(most) == 2
    return list(most.values())


def held_by(process):
    lines = (process / "status").read_text()
    return 1024 * sum(map(int, re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)", lines, re.MULTILINE)))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is counted by Linux alone")
@pytest.mark.parametrize("share", ["50%", "25%"])
def test_the_memory_of_a_rank_keeps_to_its_budget(share):
    options = "threads=1 ranks=2 max_steps=2 batch_size=64 micro_batches=4 codec=raw data.workers=0"
    small = held_by_ranks(f"{options} model=mlp memory.parameters=disk hydra.run.dir=small")
    wide = f"model.hidden=[{','.join(['2048'] * 24)}]"
    large = held_by_ranks(f"{options} model=mlp {wide} memory.device={share} hydra.run.dir=large")
    budget = Plan.load("large/plan.json").memory
    assert budget is not None
    assert max(large) - min(small) <= 1.1 * budget + (64 << 20)
