"""The scripts that people copy, run as they would: plainly and under torchrun, with the same bits."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
PLAIN = [sys.executable]
RANKS = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def run(start, example, *arguments, folder):
    done = subprocess.run(
        [*start, str(EXAMPLES / example), *arguments], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.ranks
def test_the_first_example_has_one_result_in_one_process_and_on_two_ranks(tmp_path):
    shown = []
    for start, name in ((PLAIN, "plain"), (RANKS, "ranks")):
        (tmp_path / name).mkdir()
        shown.append(run(start, "train_your_model.py", folder=tmp_path / name))
    losses = [re.findall(r"step \d+: loss [\d.]+", text) for text in shown]
    assert len(losses[0]) == 22
    assert losses[0] == losses[1]
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("plain", "ranks")]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])
    accuracies = {found for text in shown for found in re.findall(r"test accuracy ([\d.]+)%", text)}
    assert len(accuracies) == 1
    assert float(accuracies.pop()) > 20  # of ten classes, after one epoch


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("library", "example", "arguments"),
    [("transformers", "llama.py", ["3"]), ("timm", "timm_images.py", ["test_efficientnet", "3"])],
)
def test_public_networks_lose_the_same_on_two_ranks(library, example, arguments, tmp_path):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install {library}")
    shown = [run(start, example, *arguments, folder=tmp_path) for start in (PLAIN, RANKS)]
    losses = [re.findall(r"step \d+: loss [\d.]+", text) for text in shown]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is one of Linux")
def test_a_plain_loop_trains_beyond_its_memory_with_one_more_line(tmp_path):
    shown = run(PLAIN, "beyond_memory.py", "disk", str(tmp_path), folder=tmp_path)
    losses = re.findall(r"step \d: loss ([\d.]+), offload: 772 MiB saved", shown)
    assert len(losses) == 3
    assert float(losses[2]) < float(losses[0])
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(AssertionError, match="can't allocate memory"):
        run(PLAIN, "beyond_memory.py", "without", folder=tmp_path)
