"""penstock bench checkpoint: neighbours are compared, bytes are those of files, a small one really runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from cases import Case, pipeline_of, plan_of
from zoo import build

import penstock
from penstock import ConfigError
from penstock.compression.codec import encode
from penstock.conf.bench_checkpoint import BenchCheckpointConfig
from penstock.scripts import command
from penstock.scripts.bench import checkpoint_bench, topics
from penstock.scripts.bench.checkpoint_bench import byte_facts, figure, sentences, step_facts

pytestmark = pytest.mark.slow  # what it tests is a tool of maintainers

SECONDS = {"without": [1.0, 2.0, 4.0], "with": [1.5, 2.0, 4.4]}
RESULTS = {
    "job": {"model": "mlp", "ranks": 2, "every": 10},
    "steps": step_facts(SECONDS, {"without": [2.0, 2.0], "with": [2.2, 2.2]}, [0.01, 0.03, 0.02]),
    "bytes": {"files": 1100, "raw": 1000, "kinds": {"all": {"raw": 1000, "exponent": 800}}},
    "starts": {
        "seconds": {"anew": 9.0, "from the checkpoint": 7.0},
        "seconds_of_runs": {"anew": [9.0], "from the checkpoint": [7.0]},
    },
}


def test_the_ratio_is_the_median_of_neighbours():
    steps = RESULTS["steps"]
    assert steps["ratio_of_pairs"] == pytest.approx([1.5, 1.0, 1.1])
    assert steps["ratio"] == pytest.approx(1.1)
    assert steps["busy_ratio"] == pytest.approx(1.1)
    assert (steps["held"], steps["seconds"]["with"]) == (0.02, 2.0)
    first, size, *starts = sentences(RESULTS)
    assert "a checkpoint every 10 steps: 1.100 times the step (1.000-1.500)" in first
    assert "training stood 20 ms" in first
    assert "(1.1000x)" in size
    assert starts == ["to the first step anew: 9.0 s (9.00-9.00)", *starts[1:]]
    assert checkpoint_bench.rows(RESULTS["bytes"])[0]["exponent"] == "1.25x"


def test_bars_of_a_panel_stand_beside_each_other():
    for axes in figure(RESULTS).axes:
        first, second = (bars[0] for bars in axes.containers if hasattr(bars, "patches"))
        assert first.get_x() + first.get_width() <= second.get_x()


def test_bytes_are_those_of_the_files_and_of_frames(tmp_path):
    case = Case(model="mlp", cuts=2, optimizer="adamw", steps=1)
    model, batches = build(case.model, case.dtype, 1)
    pipe = pipeline_of(case, plan_of(case)[0], model)
    pipe.step(*batches[0])
    penstock.save(pipe, tmp_path)
    found = byte_facts(tmp_path, ["exponent"])
    assert found["files"] == sum(path.stat().st_size for path in tmp_path.iterdir())
    weights = pipe.state_dict()["model"].values()
    assert found["kinds"]["model"]["raw"] == sum(tensor.nbytes for tensor in weights)
    assert found["kinds"]["model"]["exponent"] == sum(encode(tensor, "exponent").nbytes for tensor in weights)
    assert {"exp_avg", "exp_avg_sq", "step"} < found["kinds"].keys()
    assert found["raw"] == found["kinds"]["all"]["raw"] < found["files"]
    assert torch.tensor([sums["raw"] for sums in found["kinds"].values()]).sum() == 2 * found["raw"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"repeats": 0}, "repeats=0 must be 1 or more"),
        ({"every": 0}, "every=0 must be 1 or more"),
        ({"codecs": ["raw", "raw"]}, r"codecs=\[raw,raw\] must name each once"),
        ({"codecs": ["zip"]}, "holds zip, which is not known"),
        ({"batch_size": 2}, "too small for micro_batches=8"),
    ],
)
def test_what_does_not_fit_is_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        topics.checkpoint(BenchCheckpointConfig(**given))


@pytest.mark.slow
@pytest.mark.ranks
def test_a_small_one_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    job = (
        "model=mlp model.hidden=[16,12] data.size=8 data.channels=1 batch_size=200 every=2 repeats=2 starts=1"
    )
    assert command.run(["bench", "checkpoint", *job.split(), "threads=1", "hydra.run.dir=run"]) == 0
    out = capfd.readouterr().out
    assert "a checkpoint every 2 steps: " in out
    assert "to the first step from the checkpoint: " in out
    results = json.loads(Path("run/results.json").read_text())
    assert len(results["steps"]["ratio_of_pairs"]) == 2
    assert all(seconds > 0 for seconds in results["starts"]["seconds"].values())
    assert results["bytes"]["files"] > results["bytes"]["raw"]
    assert sorted(path.name for path in Path("run").iterdir()) == ["results.json", "results.png"]
