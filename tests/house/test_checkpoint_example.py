"""The README's run that survives: its ranks are really killed, and its lines typed as they stand.

Only images and batches are smaller than there, so that a run takes seconds."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torchvision
from commands import losses, summary
from processes import children
from safetensors.torch import load_file
from test_readme import README, blocks

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

(EXAMPLE,) = [block for block in blocks(README, "") if "checkpoint.every" in block]
FIRST, AGAIN, EXPORT = [shlex.split(line, comments=True) for line in EXAMPLE.splitlines()]
EVERY, STEPS = 10, 44
SMALL = f"data.size=16 batch_size=32 micro_batches=4 max_steps={STEPS}".split()  # threads as they come


def start(words, *more):
    command = [sys.executable, "-m", "penstock", *words[1:], *SMALL, *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process, *, code=0):
    said, _ = process.communicate(timeout=600)
    assert process.returncode == code, said
    return said


def killed(step, rank):
    """The README's first line, one rank of which is killed behind a step; what it said."""
    process, metrics = start(FIRST), Path("runs/mine/metrics.jsonl")
    until = time.monotonic() + 600
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= step):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.005)
    os.kill(children(process)[rank], signal.SIGKILL)
    return finish(process, code=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        finish(start(FIRST))
    return folder / "runs" / "mine"


@pytest.mark.parametrize(
    ("step", "rank", "more"), [(27, 1, ""), (33, 0, "stages=4 schedule=gpipe"), (25, 1, "ranks=1")]
)
def test_the_readmes_run_survives_a_kill_of_any_rank(whole, tmp_path, monkeypatch, step, rank, more):
    monkeypatch.chdir(tmp_path)
    assert AGAIN == [*FIRST, "resume=auto"]
    said = killed(step, rank)
    assert f"rank {rank}" in said.splitlines()[-1]
    said = finish(start(AGAIN, *more.split()))
    (begun,) = map(int, re.findall(r"goes on behind step (\d+) of 44", said))
    assert begun % EVERY == 0
    twice = summary("runs/mine")["resumed_from"]["repeated_steps"]
    assert twice <= EVERY + 2  # and what passed while the checkpoint was on its way
    assert not twice or f"{begun + twice} are done again" in said or f"step {begun + 1} is done again" in said
    assert losses("runs/mine") == losses(whole)
    assert len(losses("runs/mine")) == STEPS
    model = Path("runs/mine/model.safetensors")
    assert model.read_bytes() == (whole / "model.safetensors").read_bytes()


def test_the_readmes_export_loads_into_the_plain_model(whole, monkeypatch):
    monkeypatch.chdir(whole.parents[1])
    subprocess.run([sys.executable, "-m", "penstock", *EXPORT[1:]], check=True)
    found, trained = (load_file(path) for path in ("mine.safetensors", whole / "model.safetensors"))
    torchvision.models.resnet18(num_classes=10).load_state_dict(found, strict=True)
    assert found.keys() == trained.keys()
    assert int(found["bn1.num_batches_tracked"]) < int(trained["bn1.num_batches_tracked"])  # of step 40
