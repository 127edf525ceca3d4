"""``penstock train`` in this process, its ranks forked instead of started, and what a run folder says."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ranks import ForkedRank
from reference import same_bits
from safetensors.torch import load_file

from penstock.pipeline.distributed import processes
from penstock.scripts import command

SMALL = "model=mlp model.hidden=[16,12] data.size=8 data.channels=1 seed=3 threads=1"
"""A model of two hidden layers on digits of 8 x 8."""

DEADLY = (
    "model=mlp model.hidden=[16,12] data._target_=own_digits.samples data.workers=0 batch_size=40"
    " micro_batches=3 epochs=2 optimizer.momentum=0.5 scheduler=cosine seed=3 threads=1 deadline=60"
    " codec=zero_value"
)
"""Five steps an epoch of 40 samples each, which may kill a rank that reads them (``own_digits``)."""

OWN = """
import torch

from penstock.pipeline.data import Description, Samples


def samples(rows=60, nans=False, labels=int):
    inputs = torch.randn(rows, 6, generator=torch.Generator().manual_seed(0))
    targets = {int: 1, "float": 1.0, "large": 9}[labels] * (inputs[:, 0] > 0)
    if nans:
        inputs[:, 1][inputs[:, 1] > 0.5] = float("nan")
    table = torch.utils.data.TensorDataset(inputs, targets)
    return Samples(train=table, test=table, describe=Description(num_classes=2, input_shape=(6,)))


class Net(torch.nn.Module):
    def __init__(self, num_classes, width=4):
        super().__init__()
        self.wide = torch.nn.Linear(6, width)
        self.narrow = torch.nn.Linear(width, num_classes)

    def forward(self, inputs):
        return self.narrow(torch.relu(self.wide(inputs)))
"""
"""A model and data of one's own, for a file ``own.py`` in the folder where the command is typed."""


def answer(typed: str, capture: Any) -> tuple[int, str, str]:
    """Type ``penstock ...``; return exit code, standard output and standard error."""
    code = command.run(typed.split())
    return code, *capture.readouterr()


def train(typed: str) -> int:
    """Type ``penstock train ...``; return the exit code."""
    with patch.object(processes, "start_process", ForkedRank):
        return command.run(["train", *typed.split()])


def trained(typed: str) -> None:
    assert train(typed) == 0


def refusal(typed: str, capture: Any, *, name: str = "train") -> str:
    """The one line that a command is refused or fails with."""
    capture.readouterr()
    with patch.object(processes, "start_process", ForkedRank):
        assert command.run([name, *typed.split()]) == command.REFUSED
    said = capture.readouterr().err
    assert said.count("\n") == 1, said
    return said


def lines(folder: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


def losses(folder: str | Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines(folder)]


def summary(folder: str | Path) -> dict[str, Any]:
    return json.loads(Path(folder, "summary.json").read_text())


def same_model(ours: str | Path, theirs: str | Path) -> bool:
    """True if two runs ended with the same bits of the model."""
    a, b = (load_file(Path(folder, "model.safetensors")) for folder in (ours, theirs))
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


def same_run(ours: str | Path, theirs: str | Path) -> bool:
    """True if two runs had the same losses, too."""
    return losses(ours) == losses(theirs) and same_model(ours, theirs)
