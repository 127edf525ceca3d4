"""The notebooks: stored with the outputs of one run, and run from end to end at small size."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import run_results as results

from penstock import ConfigError

NOTEBOOKS = Path(results.__file__).parent
ROW = {"link": "loopback", "extra_in_flight": 0, "samples_per_second": 8.0}
RACED = {"rows": [ROW | {"side": "torch", "codec": "none"}, ROW | {"side": "penstock", "codec": "raw"}]}
TINY = {"MODEL": "squeezenet1_1", "SIZE": 32, "BATCH": 8, "MICRO_BATCHES": 2}
SMALL = {
    "throughput": {
        "JOB": "model=mlp model.hidden=[8] data.size=4 cuts=[_1] ranks=1 batch_size=64 micro_batches=2",
        "STEPS": 2,
        "BENCHES": ["race.json"],
    },
    "planning": TINY,
    "memory": TINY | {"STEPS": 2},
}
SHOWN = {  # pictures, and what the outputs say
    "throughput": (5, r"(?s)(2 steps, 128 samples in .*){3}"),  # one run of each codec
    "planning": (3, r"(?s)5Mbit: cut after .*<- chosen.*smallest budget"),
    "memory": (1, r"(?s)(counted .* s a step, loss .*){6}offload: "),
}


def stored(name):
    return json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())["cells"]


def pictures(cells):
    return sum("image/png" in output.get("data", {}) for cell in cells for output in cell.get("outputs", []))


def test_every_notebook_is_stored_as_it_ran():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == SMALL.keys()
    for name, (number, _) in SHOWN.items():
        code = [cell for cell in stored(name) if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)], name
        assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"]), name
        assert pictures(code) == number, name
        assert re.search(r"torch [\d.]+, .*20\d\d-\d\d-\d\d", str(stored(name)[0])), name  # hardware and date


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_notebook_runs_and_draws(name, tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    (tmp_path / "race.json").write_text(json.dumps(RACED))
    (first,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    first.source += "".join(f"\n{key} = {value!r}" for key, value in SMALL[name].items())
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    number, text = SHOWN[name]
    assert pictures(notebook.cells) == number
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert re.search(text, "".join(output.text for output in outputs if output.output_type == "stream"))


def test_a_folder_without_a_finished_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"metrics\.jsonl"):
        results.read_run(tmp_path)
