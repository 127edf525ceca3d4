"""Runs of ``penstock train`` in processes of their own, in which something happens at a chosen moment.

``FAULT="RANK PLACE COUNT ACTION"``: when that rank comes to a place of a model and data of one's own for the
COUNTth time, it sends a signal to itself, or with ``ACTION@launcher`` to its launcher, or sleeps."""

import os
import subprocess
import sys
import time

JOB = (
    "model._target_=own.Net model.leaves=[Gate] data._target_=own.samples optimizer._target_=own.Optimizer"
    " optimizer.lr=0.1 optimizer.momentum=0.5 batch_size=20 micro_batches=2 epochs=4 seed=3 threads=1"
    " deadline=20 data.workers=0"  # so that who reads is the rank
)

OWN = """
import os
import signal
import time
from collections import Counter

import torch

from penstock.pipeline.runtime.engine import Engine
from penstock.pipeline.data import Description, Samples

counts, running = Counter(), []


def come_to(place):
    counts[place] += 1
    rank, where, count, action = os.environ.get("FAULT", "- - 0 -").split()
    here = os.environ.get("RANK", "0"), place, str(counts[place])
    if here != (rank, where, count):
        return
    action, _, whom = action.partition("@")
    if action == "sleep":
        print("sleeps", flush=True)
        return time.sleep(600)
    if action == "raise":
        raise ValueError("sky")
    os.kill(os.getppid() if whom else os.getpid(), getattr(signal, action))
    if whom:
        time.sleep(1)


def noting(name, run):
    def noted(*args):
        running.append(name)
        try:
            return run(*args)
        finally:
            running.pop()

    return noted


Engine.step, Engine.evaluate = noting("forward", Engine.step), noting("test", Engine.evaluate)


class Gate(torch.nn.Module):
    def forward(self, x):
        come_to(" ".join(running))
        return x * 2


class Net(torch.nn.Sequential):
    def __init__(self, num_classes):
        layers = [torch.nn.Linear(6, 5), Gate(), torch.nn.ReLU(), torch.nn.Linear(5, 4), Gate()]
        super().__init__(*layers, torch.nn.Linear(4, num_classes))


class Optimizer(torch.optim.SGD):
    def step(self, *args):
        if running:  # not one that is tried out
            come_to("update")
        return super().step(*args)


class Table(torch.utils.data.TensorDataset):
    loader = None  # with LOADER in the environment, one whose worker dies

    def __getitem__(self, index):
        come_to("read")
        if "LOADER" in os.environ and "RANK" in os.environ:
            plain = torch.utils.data.TensorDataset(*self.tensors)
            self.loader = self.loader or iter(torch.utils.data.DataLoader(plain, None, num_workers=1))
            if counts["read"] == 50:
                os.kill(self.loader._workers[0].pid, signal.SIGKILL)
            next(self.loader)
        return super().__getitem__(index)


def samples():
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 6, generator=source)
    table = Table(inputs, (inputs[:, 0] > 0).long())
    return Samples(train=table, test=table, describe=Description(num_classes=2, input_shape=(6,)))
"""


def started(folder, more, *, fault="- - 0 -", job=JOB, **surroundings):
    """Start a run in ``folder``, where ``own.py`` lies."""
    (folder / "own.py").write_text(OWN)
    return subprocess.Popen(
        [sys.executable, "-m", "penstock", "train", *f"{job} {more}".split()],
        cwd=folder,
        env=os.environ | {"FAULT": fault, "OMP_NUM_THREADS": "1"} | surroundings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process, *, seconds=150):
    """Wait for a run; returns its exit code, what it printed, its errors, and how long that took."""
    begun = time.monotonic()
    try:
        out, error = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, error, time.monotonic() - begun
