"""The batch script for Slurm, with stand-ins for its commands: an agent a machine, back after a warning."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
