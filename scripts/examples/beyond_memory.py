"""A plain training loop whose forward saves more than there is memory, trained with one added line.

    python scripts/examples/beyond_memory.py                # with the line: what is saved waits on disk
    python scripts/examples/beyond_memory.py without        # without it: the memory is not enough
    python scripts/examples/beyond_memory.py disk FOLDER    # on a disk of your choice

The process is given 300 MiB beyond what it has when the training begins (RLIMIT_DATA, of Linux), and each
forward saves 768 MiB for its backward. Large blocks of memory have mappings of their own here, as with
MALLOC_MMAP_THRESHOLD_=131072 in the environment: glibc else keeps most of what was freed between others.
"""

import contextlib
import ctypes
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import penstock

LAYERS, WIDTH, BATCH, STEPS = 96, 128, 8192, 3
MEMORY = 300 << 20


@contextlib.contextmanager
def memory(num_bytes: int) -> Iterator[None]:
    """Let the process take so many bytes more than it has, and no others."""
    ctypes.CDLL(None).mallopt(-3, 128 << 10)  # M_MMAP_THRESHOLD
    lines = Path("/proc/self/status").read_text().splitlines()
    has = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (has + num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def train(tier: str, folder: str | None) -> None:
    """Train the network for a few steps; ``tier``: disk, or without."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(BATCH, WIDTH)
    y = x.square().mean(dim=1, keepdim=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        saved = contextlib.nullcontext() if tier == "without" else penstock.offload(tier, path=folder)
        with saved:  # the added line
            loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.6f}", *[saved] * (tier != "without"), sep=", ")


def main(tier: str = "disk", folder: str | None = None) -> None:
    """Train within the memory, and say what the process took at most."""
    with memory(MEMORY):
        train(tier, folder)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"the process took {most:.0f} MiB at most")


if __name__ == "__main__":
    main(*sys.argv[1:])
