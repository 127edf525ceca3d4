"""The notebook: stored without outputs, and run from end to end at small size."""

import json
import os
import sys
from pathlib import Path

import pytest
import run_results as results

from penstock import ConfigError

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


def test_a_folder_without_a_finished_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        results.read_run(tmp_path)
