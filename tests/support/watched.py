"""The cost of a watched step (docs/exactness.md): `python tests/support/watched.py`."""

import contextlib
import statistics
import time

import torch
import torchvision
from torch import nn

import penstock


def seconds(model: nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """The median times of a step and of a watched one, taken in turns."""
    y = torch.randint(10, (len(x),))
    profile = penstock.measure(penstock.trace(model, (x[:8],)), (x[:8],), repeats=1)
    plan = penstock.partition(profile, stages=2, micro_batches=4)
    loss, optimizer = nn.functional.cross_entropy, lambda named: torch.optim.SGD(named, lr=0.01, momentum=0.9)
    taken: list[list[float]] = [[], []]
    with contextlib.closing(penstock.Pipeline(model, plan, optimizer=optimizer, loss=loss)) as pipe:
        for number in range(24):
            if number % 2:
                pipe.guards.loaded()
            begun = time.perf_counter()
            pipe.step(x, y)
            taken[number % 2].append(time.perf_counter() - begun)
    plain, watched = (statistics.median(some[2:]) for some in taken)
    return plain, watched


if __name__ == "__main__":
    torch.set_num_threads(1)
    wide = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 10))
    for name, model, x in (
        ("resnet18", torchvision.models.resnet18(num_classes=10), torch.randn(32, 3, 64, 64)),
        ("three linear layers", wide, torch.randn(32, 20)),
    ):
        plain, watched = seconds(model, x)
        print(f"{name}: {plain:.4f} s, watched {watched:.4f} s, {watched / plain:.2f} times")
