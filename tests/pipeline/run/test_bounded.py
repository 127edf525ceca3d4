"""Runs under a budget, and those whose model no process has whole."""

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import OWN, SMALL, refusal, same_run, summary, trained
from ranks import ForkedRank
from reports import PLAN, report
from safetensors.torch import load_file, save_file
from torch import nn
from valueless import plan_of, rank_writes, saved
from zoo import build

from penstock.pipeline import models
from penstock.pipeline.data import digits
from penstock.pipeline.distributed import processes
from penstock.pipeline.run import bounded, metrics, tables
from penstock.pipeline.run.build import parameters_on_meta
from penstock.pipeline.run.metrics import MOST
from penstock.pipeline.runtime.report import SUMS, StageReport
from penstock.scripts import command
from penstock.stages.memory.parameter_offload import OffloadedParameters
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

    monkeypatch.setattr(processes, "start_process", start)
    return lambda typed: (command.run(["train", *typed.split()]), modules)


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


QUICK = "threads=1 ranks=2 max_steps=2 codec=raw data.workers=0"
NETWORKS = {
    "mlp": f"model=mlp model.hidden=[{','.join(['2048'] * 24)}] batch_size=64 micro_batches=4",
    "gpt": "model=gpt data=text model.width=512 model.layers=12 batch_size=16 micro_batches=4",
    "resnet152": "model=torchvision model.name=resnet152 data.size=32 batch_size=16 micro_batches=4",
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the memory of a process is counted by Linux alone")
@pytest.mark.parametrize(
    ("network", "share"), [("mlp", "50%"), ("mlp", "25%"), ("gpt", "50%"), ("resnet152", "25%")]
)
def test_the_memory_of_a_rank_keeps_to_its_budget(network, share):
    small = held_by_ranks(f"{QUICK} model=mlp memory.parameters=disk hydra.run.dir=small")
    large = held_by_ranks(f"{QUICK} {NETWORKS[network]} memory.device={share} hydra.run.dir=large")
    budget = Plan.load("large/plan.json").memory
    assert budget is not None
    assert max(large) - min(small) <= 1.1 * budget + (64 << 20)


GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def group():
    """A memory cgroup of its own."""
    made = GROUPS / f"penstock-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield made
    made.rmdir()


def most_in(group, typed, *, limit=-1):
    """Type ``penstock train`` in a cgroup with a limit; the exit code, and the most bytes it held."""
    (group / "memory.limit_in_bytes").write_text(str(limit))
    (group / "memory.max_usage_in_bytes").write_text("0")
    line = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -m penstock train {typed}"
    code = subprocess.run(["sh", "-c", line], check=False).returncode
    return code, int((group / "memory.max_usage_in_bytes").read_text())


@pytest.mark.slow
def test_a_run_completes_in_a_cgroup_of_its_budget(group):
    """A small model says what torch and three processes take."""
    code, small = most_in(group, f"{QUICK} model=mlp memory.parameters=disk hydra.run.dir=small")
    assert code == 0
    plain, needed = most_in(group, f"{QUICK} {NETWORKS['mlp']} hydra.run.dir=plain")
    assert plain == 0
    trained(f"{QUICK} {NETWORKS['mlp']} memory.device=25% hydra.run.dir=planned")
    budget = Plan.load("planned/plan.json").memory
    assert budget is not None
    limit = small + 2 * round(1.1 * budget + (64 << 20))
    assert limit < needed  # which the whole would not keep to
    code, _ = most_in(group, f"{QUICK} {NETWORKS['mlp']} memory.device=25% hydra.run.dir=run", limit=limit)
    assert code == 0
    assert same_run("planned", "run")


CUT = f"{SMALL} batch_size=50 micro_batches=3 max_steps=3 cuts=[_2] codec=raw"


def weights():
    """A file of what the model of ``CUT`` begins with."""
    torch.manual_seed(3)
    model = models.mlp(digits.load(size=8, channels=1).describe, hidden=[16, 12])
    save_file(model.state_dict(), "first.safetensors")


@pytest.mark.ranks
def test_a_run_from_a_file_is_that_of_the_model_that_was_made_whole():
    weights()
    trained(f"{CUT} ranks=2 hydra.run.dir=whole")
    trained(f"{CUT} ranks=2 hydra.run.dir=bare model.load_weights=first.safetensors")
    whole, bare = (Path(run) / "model.safetensors" for run in ("whole", "bare"))
    assert whole.read_bytes() == bare.read_bytes() != Path("first.safetensors").read_bytes()
    counts = [[stage["parameters"] for stage in summary(run)["stages"]] for run in ("whole", "bare")]
    assert counts[0] == counts[1]
    assert sum(counts[0]) == sum(tensor.numel() for tensor in load_file(bare).values())


def filled(name, tensor):
    nn.init.constant_(tensor, 0.25)


def test_a_function_gives_all_values_and_one_that_is_not_there_is_refused(capsys):
    job = f"{CUT} ranks=1 optimizer.lr=0 optimizer.weight_decay=0"
    trained(f"{job} hydra.run.dir=run model.init_weights={__name__}.filled")
    found = load_file("run/model.safetensors")
    assert found
    assert all(bool((tensor == 0.25).all()) for tensor in found.values())
    nowhere = "model.init_weights=nowhere.at_all"
    assert f"{nowhere} cannot be imported" in refusal(f"{job} {nowhere}", capsys)
    missing = refusal(f"{job} model.load_weights=nowhere.safetensors", capsys)
    assert "nowhere.safetensors cannot be read (No such file or directory)" in missing


def test_parameters_are_made_without_memory_and_buffers_as_they_are():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
            self.b.weight = self.a.weight
            own = nn.Parameter(torch.ones(3), requires_grad=False)
            self.first = self.second = own
            self.register_buffer("table", torch.arange(5), persistent=False)

    plain = nn.Module.register_parameter
    with parameters_on_meta():
        model = Net()
        with pytest.raises(ZeroDivisionError), parameters_on_meta():
            raise ZeroDivisionError
    assert nn.Module.register_parameter is plain
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.b.weight is model.a.weight
    assert model.first is model.second
    assert not model.first.requires_grad
    buffers = dict(model.named_buffers())
    assert torch.equal(buffers["table"], torch.arange(5))
    assert torch.equal(buffers["norm.running_var"], torch.ones(4))


@pytest.mark.parametrize("full", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_file_is_written_with_one_tensor_of_others_at_a_time(full, ranks, tmp_path):
    model, batches = build("gpt_tied")
    file = str(saved(model, tmp_path / "weights.safetensors"))
    plan_of(model, batches, 3, ranks=3)[0].save(tmp_path / "plan.json")
    arguments = (str(tmp_path / "plan.json"), file, str(tmp_path))
    (said, frames), *others = ranks.run(rank_writes, *arguments, full, ranks=3)
    number = len(model.state_dict())
    assert frames == [1] * number * (1 + full)
    assert others == [("", [0] * len(frames))] * 2
    path = tmp_path / "model.safetensors"
    if full:
        assert not path.exists()
        found = re.fullmatch(r"the disk is full; the trained weights are in (.*)", said)
        assert found
        path = Path(found[1])
    assert path.read_bytes() == (tmp_path / "gathered.safetensors").read_bytes()
    if full:
        path.unlink()
        path.parent.rmdir()


BUDGETED = (
    "model=mlp model.hidden=[256,256,256,256,256,256] data.size=8 data.channels=1 batch_size=600"
    " micro_batches=6 max_steps=4 epochs=1 optimizer=adamw seed=3 threads=1 codec=zero_value"
)

MIB = 1 << 20


def model_of(options, folder):
    trained(f"{BUDGETED} {options} hydra.run.dir={folder}")
    return Path(folder, "model.safetensors").read_bytes()


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_quarter_of_the_memory_gives_the_same_model_and_says_what_it_held(ranks, capfd):
    options = f"ranks={ranks} stages=2 schedule=gpipe"
    whole = model_of(options, "whole")
    assert "predicted" not in capfd.readouterr().out
    less = model_of(f"{options} memory.device=45%", "less")
    said = capfd.readouterr().out
    assert less == whole
    for rank in range(ranks):
        assert f"rank {rank} will hold at most, by its first step: device" in said
        assert said.index(f"rank {rank} will hold") < said.index("epoch 1/1")
    assert "budget  predicted" in said
    rows = summary("less")["tiers"]
    assert {(row["rank"], row["tier"]) for row in rows} >= {(rank, "device") for rank in range(ranks)}
    assert any(row["tier"] == "disk" and row["exposed_seconds"] > 0 for row in rows)
    for row in rows:
        assert 0 < row["peak_bytes"] <= row["predicted_peak_bytes"] + MIB  # that may wait to be written
        if row["tier"] == "device":
            assert row["peak_bytes"] <= row["budget_bytes"] + 2 * MIB  # and frames between stages, of 1.2


def test_a_process_that_holds_more_than_its_budget_is_named_once():
    told = []
    see = tables.overrun(dataclasses.replace(PLAN, memory=100 * MIB), told.append)
    for resident in (174 * MIB, 175 * MIB, 300 * MIB):  # 1.1 times as much, and 64 MiB
        stages = StageReport(rank=1, resident_bytes=resident), StageReport(rank=0, resident_bytes=MIB)
        see(dataclasses.replace(report(), stages=stages))
    assert [line.partition(" more")[0] for line in told] == ["rank 1 holds 175 MiB"]
    without = tables.overrun(dataclasses.replace(PLAN, memory=None), told.append)
    without(dataclasses.replace(report(), stages=stages))
    assert len(told) == 1


@pytest.mark.parametrize(
    ("memory", "packed", "said"),
    [
        (None, 0, []),
        (None, 20, ["rank 0 {}: device 130 B, packed 20 B", "rank 1 {}: device 7 B"]),
        (999, 0, ["rank 0 {}: device 130 B", "rank 1 {}: device 7 B"]),
    ],
)
def test_the_first_step_foretells_what_the_closing_table_will_show(memory, packed, said):
    told, plan = [], dataclasses.replace(PLAN, memory=memory)
    see = tables.foretell(plan, told.append)
    first = dataclasses.replace(report(), stages=(
        StageReport(rank=1, device_tier=7),
        StageReport(rank=0, device_tier=100, packed_tier=packed, grew_bytes=30),
    ))  # fmt: skip
    see(first)
    see(first)
    assert told == [line.format("will hold at most, by its first step") for line in said]
    total = dict.fromkeys((*SUMS, *MOST), 0) | {"device_tier": 100, "packed_tier": packed}
    rows = metrics.tier_rows([[total]], {}, [[0]], plan)
    assert (tables.tier_table({"tiers": rows, "steps": 1}) is not None) == bool(said)


def test_a_mirror_is_not_brought_back_to_be_written(monkeypatch):
    """At the end of a run less is near than all: its tensors go to the file one by one."""
    monkeypatch.setattr(OffloadedParameters, "pull_all", None)
    assert model_of("ranks=1 stages=2 memory.parameters=disk", "mirrored") == model_of(
        "ranks=1 stages=2", "whole"
    )
