"""A module of Lightning, cut into stages: plainly or under torchrun; pip install lightning.

torchrun --nproc-per-node 2 scripts/examples/lightning_strategy.py 6
"""

import sys
from typing import Any

import lightning.pytorch as lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from penstock.pipeline.integrations.lightning import PenstockStrategy


class Net(lightning.LightningModule):
    """``loss(outputs, targets)`` takes the place of ``training_step``."""

    loss = staticmethod(nn.functional.cross_entropy)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs of the last stage."""
        return self.layers(x)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return what another strategy trains with."""
        return self.loss(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Print the loss of a step."""
        if self.trainer.is_global_zero:
            print(f"step {self.global_step - 1}: loss {outputs['loss'].item()}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer, whose settings each stage gets."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(steps: int = 20) -> None:
    """Train as Lightning does."""
    lightning.seed_everything(0)
    x = torch.randn(64, 32)
    data = DataLoader(TensorDataset(x, x[:, :4].argmax(1)), 16, shuffle=True)
    trainer = lightning.Trainer(
        max_steps=steps, strategy=PenstockStrategy(micro_batches=4), accelerator="cpu"
    )
    trainer.fit(Net(), data)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
