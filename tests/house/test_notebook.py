"""The notebook: stored without outputs, and run from end to end at small size."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import run_results as results
import torch

import penstock
from penstock import ConfigError
from penstock.pipeline.run.run_folder import RunFolder

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "scripts" / "notebooks").glob("*.ipynb"))
SMALL = {
    "JOB": "model=mlp model.hidden=[8] data=digits data.size=4 cuts=[_1] ranks=1 batch_size=64 "
    "micro_batches=2",
    "STEPS": 2,
}
ROW = {"link": "loopback", "extra_in_flight": 0, "samples_per_second": 8.0}
RACED = {"rows": [ROW | {"side": "torch", "codec": "none"}, ROW | {"side": "penstock", "codec": "raw"}]}


def test_notebooks_are_stored_without_outputs():
    for path in NOTEBOOKS:
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert cells
        assert not any(cell["outputs"] or cell["execution_count"] for cell in cells), path


@pytest.mark.slow
def test_the_throughput_notebook_runs_and_draws(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    (path,) = [path for path in NOTEBOOKS if path.stem == "throughput"]
    notebook = nbformat.read(path, as_version=4)
    (tmp_path / "race.json").write_text(json.dumps(RACED))
    parameters = SMALL | {"BENCHES": [str(tmp_path / "race.json")], "FOLDER": str(tmp_path / "runs")}
    (first,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    first.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    drawn = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(drawn) == 5  # speeds, bytes, ratios, timelines, the race
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert printed.count("2 steps, 128 samples in ") == 3  # one run of each codec


def run(folder: Path, codec: str, sent: int) -> results.Run:
    """A finished run of three steps, made by hand."""
    folder.mkdir()
    files = RunFolder(path=folder)
    rates = (1.0, 10.0, 30.0)
    files.metrics.write_text("".join(json.dumps({"samples_per_second": rate}) + "\n" for rate in rates))
    totals = {"bytes_raw_forward": 3 << 20, "bytes_raw_backward": 6 << 20}
    totals |= {"bytes_sent_forward": sent, "bytes_sent_backward": 2 * sent}
    files.summary.write_text(json.dumps({"steps": 3, **totals}))
    model, example = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()), (torch.zeros(2, 3),)
    profile = penstock.measure(penstock.trace(model, example), example, repeats=1)
    penstock.partition(profile, stages=1, micro_batches=1, codec="raw").save(files.plan)
    assert results.read_run(folder).label == "raw"  # the plan's codec
    return results.read_run(folder, label=codec)


def bars(axes: Any) -> dict[str, list[float]]:
    return {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}


@pytest.mark.slow
def test_runs_are_drawn_beside_each_other(tmp_path):
    runs = [run(tmp_path / "a", "raw", 3 << 20), run(tmp_path / "b", "small", 1 << 20)]
    steps, medians = cast(list[Any], results.draw_speeds(runs).axes)
    lines = {line.get_label(): line.get_xydata().tolist() for line in steps.lines}
    assert lines == {label: [[1.0, 10.0], [2.0, 30.0]] for label in ("raw", "small")}
    assert [bar.get_height() for bar in medians.patches] == [20.0, 20.0]
    (axes,) = results.draw_bytes(runs).axes
    packed = {"raw": [1.0, 2.0], "small": pytest.approx([1 / 3, 2 / 3])}
    assert bars(axes) == {"before packing": [1.0, 2.0], **packed}
    (axes,) = results.draw_ratios({"raw": {"a activation": 0.9}, "small": {"a activation": 2.0}}).axes
    assert bars(axes) == {"raw": [0.9], "small": [2.0]}


def test_a_folder_without_a_finished_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        results.read_run(tmp_path)
