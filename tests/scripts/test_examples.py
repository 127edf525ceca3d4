"""The scripts that people copy, run as they would: plainly and under torchrun, with the same bits."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ON_RANKS, run_script
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
PLAIN, RANKS = (), ON_RANKS


def run(start, example, *arguments, folder):
    return run_script(*start, str(EXAMPLES / example), *arguments, cwd=folder)


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
    [
        ("transformers", "llama.py", ["3"]),
        ("peft", "lora.py", ["3"]),
        ("accelerate", "trainer.py", ["3"]),
        ("lightning", "lightning_strategy.py", ["3"]),
        ("timm", "timm_images.py", ["test_efficientnet", "3"]),
        ("torch", "attention_residuals.py", ["3"]),
    ],
)
def test_public_networks_lose_the_same_on_two_ranks(library, example, arguments, tmp_path):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install {library}")
    shown = [run(start, example, *arguments, folder=tmp_path) for start in (PLAIN, RANKS)]
    losses = [re.findall(r"step \d+: loss [\d.]+", text) for text in shown]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]
    assert "DIFFERENT" not in "".join(shown)  # from the plain loop


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("host", ["ddp", "fsdp2"])
def test_gradients_of_torchs_own_data_parallel_travel_packed(host, tmp_path):
    shown = run(RANKS, "data_parallel.py", host, folder=tmp_path)
    assert {*re.findall(r"rank (\d):", shown)} == {"0", "1"}
    ratios = [float(ratio) for ratio in re.findall(r"\((\d\.\d+)x\)", shown)]
    assert len(ratios) == {"ddp": 2, "fsdp2": 4}[host]
    assert min(ratios) > 1.02


def test_examples_of_integrations_are_short():
    for name in ("data_parallel", "trainer", "lightning_strategy", "mosaicml_next_use", "torch_pipelines"):
        lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
        assert sum(bool(line.strip()) for line in lines) <= 40, name


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


SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm.sbatch"
SRUN = """#!/bin/bash
for number in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do SLURM_NODEID=$number "$@" & tasks+=($!); done
worst=0
for task in "${tasks[@]}"; do wait "$task"; code=$?; [ "$code" -gt "$worst" ] && worst=$code; done
exit "$worst"
"""
TORCHRUN = f"""#!/bin/bash
exec {sys.executable} -m torch.distributed.run "$@"
"""
JOB = "model=mlp model.hidden=[16] data.size=8 data.channels=1 batch_size=200 max_steps=2 codec=raw threads=1"


def batch(folder, *options, nodes, **commands):
    """Run the script; ``commands``: what stands in for those of the system."""
    stand_ins = folder / "bin"
    stand_ins.mkdir()
    usual = {"srun": SRUN, "hostname": "#!/bin/sh\necho 127.0.0.1 10.0.0.1\n", "torchrun": TORCHRUN}
    for name, text in (usual | commands).items():
        (stand_ins / name).write_text(text)
        (stand_ins / name).chmod(0o755)
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NUM_NODES": str(nodes)}
    job |= {"RANKS_PER_NODE": str(2 // nodes), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", str(SCRIPT), *JOB.split(), *options],
        env=os.environ | job | {"PATH": f"{stand_ins}:{os.environ['PATH']}"},
        cwd=folder, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_runs_one_agent_on_each_machine(nodes, tmp_path):
    done = batch(tmp_path, nodes=nodes)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("runs/slurm-*/summary.json"))) == 1
    assert "2 stages on 2 ranks" in done.stdout


def test_a_job_that_was_warned_comes_back(tmp_path):
    warned = batch(
        tmp_path,
        nodes=1,
        srun="#!/bin/sh\nkill -USR1 $PPID\nsleep 1\nexit 1\n",
        scancel="#!/bin/sh\necho scancel $*\n",
        scontrol="#!/bin/sh\necho scontrol $*\n",
    )
    job = os.getpid()
    assert (warned.returncode, warned.stdout) == (1, f"scancel --signal=TERM {job}\nscontrol requeue {job}\n")


def test_a_job_that_fails_stays_away(tmp_path):
    failed = batch(tmp_path, nodes=2, scontrol="#!/bin/sh\necho back\n", torchrun="#!/bin/sh\nexit 2\n")
    assert (failed.returncode, failed.stdout) == (2, "")
