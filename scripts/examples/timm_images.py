"""Any network of timm on images: plainly or under torchrun.

pip install timm
torchrun --nproc-per-node 2 scripts/examples/timm_images.py resnet18 20
"""

import sys
from itertools import islice
from typing import Any

import timm
import torch
from torch.utils.data import DataLoader

import penstock
from penstock.pipeline.data import digits

BATCH, MICRO_BATCHES = 64, 8


def main(name: str = "resnet18", steps: int = 20, size: int = 32) -> None:
    """Cut the network in two where the planner likes it, train it, and test it."""
    torch.manual_seed(0)
    data: Any = digits.load(size=size)
    model = timm.create_model(name, num_classes=10)
    loader = DataLoader(data.train, batch_size=BATCH, shuffle=True, drop_last=True)
    example = (torch.stack([data.train[i][0] for i in range(BATCH // MICRO_BATCHES)]),)
    pipe = penstock.Pipeline.of(
        model,
        example,
        stages=2,
        micro_batches=MICRO_BATCHES,
        loss=torch.nn.CrossEntropyLoss(label_smoothing=0.1),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.05),
    )
    if pipe.rank == 0:
        print(pipe.plan)
    for inputs, targets in islice(loader, steps):
        report = pipe.step(inputs, targets)
        if pipe.rank == 0:
            print(f"step {report.step}: loss {report.loss:.4f}")
    inputs, targets = next(iter(DataLoader(data.test, batch_size=len(data.test))))
    if (outputs := pipe.evaluate(inputs)) is not None:
        print(f"test accuracy {(outputs.argmax(1) == targets).float().mean():.1%}")
    pipe.close()


if __name__ == "__main__":
    name, *rest = sys.argv[1:] or ["resnet18"]
    main(name, *map(int, rest))
