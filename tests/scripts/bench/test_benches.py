"""Benches: each runs at its smallest size, refuses bad input in one sentence."""

import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import harness
import pytest
import torch
from checkout import ROOT, run
from profiles import GRAPH

BENCHES = ROOT / "scripts" / "bench"
TOPICS = "cache codecs convergence gpu integrations offload pipeline planner replicas".split()
FACTS = {"command", "date", "hardware", "versions", "system", "load_before", "load_after"}
MLP = "model=mlp data.size=8 batch_size=32 threads=1"


def topic(name: str) -> Any:
    """The module of a topic; ``import codecs`` would be the standard library's."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCHES / f"{name}.py")
    assert spec
    assert spec.loader
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# Whole runs.


def check(name: str, found: dict[str, Any]) -> None:
    """Hold the results of a bench at its smallest size against what they must say."""
    match name:
        case "pipeline":
            torchs, ours = found["rows"]
            assert (torchs["side"], ours["side"], ours["codec"]) == ("torch", "penstock", "raw")
            assert ours["bytes_sent_forward"] > torchs["bytes_sent_forward"] > 0  # headers
            losses = found["links"][0]["first_losses"].values()
            assert max(losses) == pytest.approx(min(losses), rel=1e-3)
        case "pipeline schedules":
            assert [row.get("rival", "") for row in found["rows"]] == ["", "torch 1f1b", "1f1b"]
            assert found["rows"][2]["live_versions"] == [2, 1]
        case "codecs":
            rows = {(row["class"], row["codec"]): row for row in found["rows"]}
            assert rows["synthetic", "raw"]["ratio"] == 1
            assert rows["synthetic", "zero_value"]["ratio"] == pytest.approx(1.9, rel=0.1)
            assert {codec for kind, codec in rows if kind == "integers"} == {"raw", "zero_value", "lz4"}
        case "convergence":
            synchronous, delayed, fed = (run["held_out"] for run in found["runs"][:3])
            assert delayed == fed != synchronous  # updates 0 and 1 have nothing to make up
            best = min(found["sweep"][:4], key=lambda run: run["held_out"])
            assert {run["lr"] for run in found["runs"][:3]} == {best["lr"]}
        case "offload":
            kept, disk = found["rows"]
            assert (kept["contestant"], disk["contestant"]) == ("kept", "disk_parameters")
            assert disk["bytes_written"] > 0 == kept["bytes_written"]
        case "integrations":
            assert [row["host"] for row in found["rows"]] == ["pipeline", "ddp_fp32", "fsdp2_bf16"]
            assert all(row["same"] and row["ratio"] > 0.9 for row in found["rows"])
        case "planner":
            assert [row["ranks"] for row in found["graphs"]] == [2] * 4
            assert all(-1e-9 <= row["over"] <= 0.05 for row in found["graphs"])
            (row,) = found["rows"]
            assert min(row["predicted"], row["measured"]) > 0
            assert abs(row["bytes"]) <= 0.05
        case "replicas":
            assert [row["bound"] for row in found["speeds"]] == [pytest.approx(2 / 3), 1.0]
            assert [row["ranks"] for row in found["exact"]] == [1, 2, 2]
        case "cache":
            lru, next_use = found["simulated"]
            assert lru["hit_rate"] < next_use["hit_rate"]
            assert 0.9 < next_use["of_optimum"] <= 1
            assert set(found["hit"]["microseconds"]) == {"hit", "file in the page cache"}


RUNS = {
    "pipeline": (
        f"{MLP} data.num_samples=128 micro_batches=2 --links loopback --codecs raw --extra-in-flight 0 "
        "--steps 1 --repeats 2"
    ),
    "pipeline schedules": (
        f"{MLP} model.hidden=[16,16,16] data.num_samples=128 micro_batches=4 --links loopback --codecs raw "
        "--schedules 1f1b,async_1f1b --steps 1 --repeats 1"
    ),
    "codecs": (
        "--classes synthetic,integers --sizes 16KiB --densities 0.5 --dtypes float32 "
        "--repeats 1 --codecs raw,zero_value,lz4"
    ),
    "convergence": "--steps 2 --repeats 1",
    "offload": (
        f"{MLP} --contestants disk_parameters --limits none --repeats 1 --steps 1 --speed-bytes 8MiB"
    ),
    "integrations": (
        f"{MLP} data.num_samples=128 micro_batches=2 --hosts pipeline,ddp_fp32,fsdp2_bf16 --links loopback "
        "--steps 1 --repeats 1"
    ),
    "planner": "--graphs . --networks mlp --links loopback --repeats 1 --steps 5",
    "replicas": (
        f"{MLP} model.hidden=[16,16] batch_size=16 micro_batches=4 --parts speeds,exact --factors 2 "
        "--seconds 0.1 --repeats 1 --steps 1"
    ),
    "cache": (
        "--parts simulated,hit --policies lru,next_use --jobs 2 --shares 0.25 --reads same "
        "--num-samples 40 --batch-size 10 --epochs 3 --sample-bytes 8kB --repeats 1"
    ),
}


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("name", RUNS)
def test_a_bench_runs_at_its_smallest_size(name: str, tmp_path: Path):
    file = BENCHES / f"{name.split()[0]}.py"
    (tmp_path / "small.graph.txt").write_text(GRAPH)
    words = [*shlex.split(RUNS[name]), "--results", str(tmp_path / "found" / "results.json")]
    assert run(str(file), *words, cwd=tmp_path, seconds=400).splitlines()[-1] == words[-1]
    found = json.loads((tmp_path / "found" / "results.json").read_text())
    assert found.keys() >= FACTS
    assert found["command"] == shlex.join(["python", f"scripts/bench/{file.name}", *words])
    assert found["versions"]["torch"] == str(torch.__version__)
    check(name, found)


# Bad input.

REFUSED = {
    "cache --policies belady": "belady is not known; known are next_use",
    "codecs --repeats 0": "0 must be a whole number of 1 or more",
    "integrations --only packed": "--only measures the peak of one process, which races one host",
    "planner --steps 2": "2 must be a whole number of 4 or more",
    "offload --path nowhere": "--path=nowhere is no folder; name the one",
    "pipeline batch_size=10 micro_batches=4": "micro-batches of one size, found ranks=2 batch_size=10",
    "replicas --nothing": "unrecognized arguments: --nothing",
}


@pytest.mark.parametrize("typed", REFUSED)
def test_bad_input_is_one_sentence(typed, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    name, *words = shlex.split(typed)
    module = topic(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    with pytest.raises(SystemExit) as ended:
        harness.main(module.options(), module.bench)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{name}.py: ")
    assert REFUSED[typed] in line
    assert not list(tmp_path.iterdir())


def documented() -> list[str]:
    """Commands of benches in the docs, blocks and text alike."""
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    text = "\n".join(page.read_text() for page in [*pages, *sorted((ROOT / "docs").glob("*.md"))])
    inline = re.findall(r"`python scripts/bench/([^`]+)`", text)
    blocks = re.findall(r"^python scripts/bench/([^#\n]+)", text, flags=re.MULTILINE)
    found = [*inline, *blocks, 'gpu.py --results "results"']
    return list(dict.fromkeys(" ".join(one.split()) for one in found if "TOPIC" not in one))


@pytest.mark.parametrize("typed", documented())
def test_a_documented_command_is_not_refused(typed):
    file, *words = shlex.split(typed)
    asked = topic(file.removesuffix(".py")).options().parse_intermixed_args(words)
    if getattr(asked, "job", None):
        harness.train_config(asked.job, {"data": "fake"})


def test_every_topic_is_documented():
    assert {one.partition(".py")[0] for one in documented()} == {*TOPICS}
