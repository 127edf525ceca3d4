"""Runs of ``penstock train`` in processes of their own, which can be killed at a chosen moment.

They are forked from a process that has torch already, and joined as a launcher such as torchrun joins them,
so that a run takes a second or two. The one that is to die counts what it does (``KINDS``), and sends itself
a SIGKILL instead of the n-th of a kind: nothing of it is in the code that is tested."""

import collections
import functools
import json
import os
import signal
import sys
import time
from pathlib import Path

from processes import free_port
from ranks import context

KINDS = ("F", "B", "U", "evaluation", "tensor", "sync", "part", "index", "remove")
"""Instructions; bytes of a tensor read for its part; a file or folder told to the disk; a part and an index
that get their names; something old that is removed."""

GRACE = 3.0  # seconds that the others may take to notice a rank that was killed
LIMIT = 180.0  # seconds for a run

OWN = """
import torch
from penstock.pipeline.data import Description, Samples


def samples():
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(60, 6, generator=source)
    table = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long())
    return Samples(train=table, test=table, describe=Description(num_classes=2, input_shape=(6,)))


class Net(torch.nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(
            torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(0.2),
            torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.Dropout(0.2),
            torch.nn.Linear(8, num_classes),
        )
"""
JOB = (
    "model._target_=own.Net data._target_=own.samples batch_size=20 micro_batches=4 epochs=3 seed=3 threads=1"
    " optimizer=adamw scheduler=cosine clip.norm=1 checkpoint.every=2 checkpoint.keep=2 deadline=30"
    " extra_in_flight=0"
)
"""Nine steps, evaluated after every third; the last checkpoint is behind the eighth."""


def run(folder, options, *, ranks=1, kill=None, counts=None):
    """Train in ``folder``; returns exit codes by rank (negative for a signal), and what was said.

    Args: kill: (rank, kind, n), the moment at which a rank dies; counts: a file for how often each kind
          came, by rank."""
    (Path(folder) / "own.py").write_text(OWN)
    surroundings = _launched(ranks) if ranks > 1 else {}
    words = f"{JOB} ranks={ranks} {options}".split()
    processes = [
        context.Process(
            target=_work,
            args=(str(folder), words, rank, surroundings, kill and kill[0] == rank and kill[1:], counts),
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    until = time.monotonic() + LIMIT
    while any(process.is_alive() for process in processes) and time.monotonic() < until:
        time.sleep(0.02)
        if any(process.exitcode for process in processes):
            until = min(until, time.monotonic() + GRACE)
    for process in processes:
        process.kill()
        process.join()
    said = "".join((Path(folder) / f"said_{rank}").read_text() for rank in range(ranks))
    return [process.exitcode for process in processes], said


def _launched(ranks):
    numbers = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": free_port()}
    names = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    return {name: str(value) for name, value in numbers.items()} | names


def _work(folder, words, rank, surroundings, kill, counts):
    from penstock.scripts import command

    os.chdir(folder)
    sys.path.insert(0, folder)  # as `python -m` does
    file = os.open(f"said_{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if surroundings:
        os.environ.update(surroundings, RANK=str(rank), LOCAL_RANK=str(rank))
    seen = watch(kill)
    code = command.run(["train", *words])
    if counts:
        Path(f"{counts}_{rank}").write_text(json.dumps(seen))
    sys.stdout.flush()
    os._exit(code)


def watch(kill):
    """Count what this process does from now on, and die instead of the n-th of a kind; returns the counts."""
    from penstock.pipeline.runtime.engine import Engine
    from penstock.stages import files, safetensors_io

    seen = collections.Counter()

    def happens(kind):
        seen[kind] += 1
        if kill and (kind, seen[kind]) == tuple(kill):
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(kind, function):
        @functools.wraps(function)
        def call(*args, **options):
            happens(kind)
            return function(*args, **options)

        return call

    for name, kind in {"_forward": "F", "_backward": "B", "_update": "U", "_evaluate": "evaluation"}.items():
        setattr(Engine, name, counted(kind, getattr(Engine, name)))
    safetensors_io._bytes_of = counted("tensor", safetensors_io._bytes_of)
    files.sync = counted("sync", files.sync)

    def hook(event, args):
        if event == "os.rename" and "/checkpoints/" in (target := str(args[1])):
            happens("index" if target.endswith("index.json") else "part")
        elif event in ("os.remove", "os.rmdir") and ("/checkpoints/" in str(args[0]) or args[1] != -1):
            happens("remove")  # by its path, or in an open folder, as shutil.rmtree does

    sys.addaudithook(hook)
    return seen
