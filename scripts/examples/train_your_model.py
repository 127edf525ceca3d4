"""Your own model, data and loop in a pipeline: run it as it is, or under `torchrun --nproc-per-node 2`."""

import sys
from typing import Any

import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

import penstock
from penstock.pipeline.data import digits


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The share of samples whose largest output is that of their class."""
    return (outputs.argmax(1) == targets).float().mean()


def main(epochs: int = 1, file: str = "model.safetensors") -> None:
    """Plan, train, test, save, and load what was saved into the plain model."""
    torch.manual_seed(0)  # every rank makes the same weights, and shuffles alike
    model = torchvision.models.resnet18(num_classes=10)
    data: Any = digits.load()
    loader = DataLoader(data.train, batch_size=64, shuffle=True, drop_last=True)  # any map-style dataset
    example = (torch.stack([data.train[i][0] for i in range(8)]),)  # one micro-batch
    pipe = penstock.Pipeline.of(  # joins torchrun's ranks; started plainly, all stages run in this process
        model,
        example,
        stages=2,
        micro_batches=8,
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        scheduler=lambda optimizer: OneCycleLR(optimizer, max_lr=0.02, total_steps=epochs * len(loader)),
        clip=1.0,
    )
    if pipe.rank == 0:
        print(pipe.plan)
    for _ in range(epochs):
        for inputs, targets in loader:
            report = pipe.step(inputs, targets)
            if pipe.rank == 0:
                print(f"step {report.step}: loss {report.loss:.4f}")
    tested = pipe.evaluate(DataLoader(data.test, batch_size=256), metrics={"accuracy": accuracy})
    if pipe.rank == 0:
        print(f"test accuracy {tested['accuracy']:.1%}")
    weights = pipe.state_dict()["model"]  # under the model's own names; whole on rank 0
    if pipe.rank == 0:
        save_file(weights, file)
        torchvision.models.resnet18(num_classes=10).load_state_dict(load_file(file))
    pipe.close()


if __name__ == "__main__":
    main(epochs=int(sys.argv[1]) if len(sys.argv) > 1 else 1)
