"""``penstock train`` among processes that somebody else's launcher started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import DEADLY, SMALL, same_model, trained

from penstock.scripts import command

pytestmark = pytest.mark.ranks

JOB = f"{SMALL.replace(' threads=1', '')} batch_size=50 micro_batches=3 max_steps=2 deadline=60".split()
SWEEP = ["seed=3,4" if option == "seed=3" else option for option in JOB]


def launched(tmp_path, *options, ranks=2, name="train"):
    """Start a ``penstock`` command as a launcher does; returns exit codes and what each rank printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "penstock", name, *options],
            cwd=tmp_path,
            env=os.environ | meeting | {"RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        printed = [process.communicate(timeout=240)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], printed


def test_torchrun_launches_them_with_the_same_bits(tmp_path):
    job = [*JOB, "threads=1"]
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "2", "-m", "penstock", "train", *job, "hydra.run.dir=theirs"],
        timeout=240,
        check=False,
    )
    assert done.returncode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
    trained(f"{' '.join(job)} hydra.run.dir=ours ranks=1")
    assert same_model("ours", "theirs")


OWN = f"{DEADLY.replace(' epochs=2', '')} checkpoint.every=2 deadline=20 stages=2"
SUPPORT = str(Path(__file__).parents[2] / "support")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
THEIRS = ("-m", "penstock", "train", *OWN.split(), "hydra.run.dir=theirs", "resume=auto")


def same_as_in_one_process(options):
    """Whether the run in ``theirs`` ended with the bits of one that nothing happened to."""
    trained(f"{OWN} {options} hydra.run.dir=ours ranks=1")
    return same_model("ours", "theirs")


@pytest.mark.slow
def test_a_killed_rank_that_torchrun_restarts_goes_on_from_the_last_checkpoint():
    """Its store stays through the restart, and with it all that the ranks that are gone wrote there."""
    Path("kill_0").touch()
    done = subprocess.run(
        [*TORCHRUN, "--nproc-per-node", "2", "--max-restarts", "1", *THEIRS, "epochs=2"],
        env=os.environ | {"PYTHONPATH": SUPPORT, "VICTIM": "1", "AFTER": "281"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "goes on behind step" in done.stdout
    assert not Path("kill_0").exists()
    assert same_as_in_one_process("epochs=2")


@pytest.mark.slow
def test_a_host_that_torchrun_loses_is_done_without():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = f"--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --rdzv-conf last_call_timeout=10"
    hosts = f"--nnodes=1:2 --nproc-per-node 1 --max-restarts 3 {meeting}".split()
    metrics, printed, hosted = Path("theirs/metrics.jsonl"), [], []
    try:
        for name in ("stays", "goes"):  # the first keeps the store
            with Path(name).open("w") as file:
                hosted.append(
                    subprocess.Popen(
                        [*TORCHRUN, *hosts, *THEIRS, "epochs=200"],
                        env=os.environ | {"PYTHONPATH": SUPPORT},
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
            time.sleep(2)
        until = time.monotonic() + 120
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 5):
            assert time.monotonic() < until, printed
            time.sleep(0.1)
        started = subprocess.run(["pgrep", "-P", str(hosted[1].pid)], capture_output=True, text=True)
        for pid in (hosted[1].pid, *map(int, started.stdout.split())):
            os.kill(pid, signal.SIGKILL)
        assert hosted[0].wait(240) == 0, Path("stays").read_text()
    finally:
        for process in hosted:
            process.kill()
            process.wait(30)
    said = Path("stays").read_text()
    assert (
        said.index("2 stages on 2 ranks") < said.index("2 stages on 1 rank,") < said.index("goes on behind")
    )
    assert same_as_in_one_process("epochs=200")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["ranks=3"], "the launcher started 2 processes (WORLD_SIZE=2), and the run has ranks=3"),
        (["cuts=[nowhere]"], "nowhere"),
        (["optimizer.lr=-1"], "Invalid learning rate: -1"),
    ],
)
def test_a_refusal_ends_all_and_is_told_once(tmp_path, options, sentence):
    codes, printed = launched(tmp_path, *JOB, *options)
    assert (codes, printed[1]) == ([command.REFUSED, 0], ""), printed
    (said,) = printed[0].splitlines()
    assert sentence in said


BREAKS = """
import os, torch


def breaks(x):
    if os.environ["RANK"] == "1" and len(x) == 16 and not x.is_meta:
        raise ValueError("broken here")
    return x


torch.fx.wrap("breaks")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(64, 8), torch.nn.Linear(8, 10)

    def forward(self, x):
        return self.b(breaks(torch.relu(self.a(x.flatten(1)))))


def net(describe):
    return Net()
"""


@pytest.mark.slow
def test_a_rank_that_fails_ends_all(tmp_path):
    Path("own.py").write_text(BREAKS)
    own = [option for option in JOB if not option.startswith("model")]
    codes, printed = launched(tmp_path, *own, "+model._target_=own.net", "cuts=[relu]")
    assert codes == [command.REFUSED, command.REFUSED], printed
    for text in printed:
        assert "rank 1, stage 1, forward of micro-batch" in text
        assert "ValueError: broken here" in text
        assert "Traceback" not in text


@pytest.mark.slow
def test_what_one_process_does_is_done_and_told_once_and_several_runs_follow_each_other(tmp_path):
    for name, options, said in [
        ("plan", (*JOB[:4], "hydra.run.dir=planned"), "2 stages on 2 ranks"),
        ("train", ("--help",), "penstock train"),
        ("train", (*SWEEP, "hydra.sweep.dir=sweep", "--multirun"), "2 stages on 2 ranks"),
    ]:
        codes, printed = launched(tmp_path, *options, name=name)
        assert (codes, printed[1]) == ([0, 0], ""), printed
        assert said in printed[0]
    assert len(list(Path("sweep").glob("*/summary.json"))) == 2


@pytest.mark.parametrize(
    ("surroundings", "sentence"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "found RANK=2 WORLD_SIZE=2"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "found RANK=0 WORLD_SIZE=two"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "rank 1 found no store of the launcher"),
    ],
)
def test_surroundings_that_are_none_of_a_launcher_are_refused(monkeypatch, capsys, surroundings, sentence):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in surroundings.items():
        monkeypatch.setenv(name, value)
    assert command.run(["train", *JOB]) == command.REFUSED
    assert sentence in capsys.readouterr().err
