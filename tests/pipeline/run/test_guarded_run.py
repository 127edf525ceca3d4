"""A run with guard=true ends with one sentence where a NaN begins, and with the same training else."""

import json
from pathlib import Path

import pytest

from penstock.scripts import command

JOB = (
    "model=mlp model.hidden=[16,12] data.size=8 data.channels=1 batch_size=50 micro_batches=2 max_steps=4"
    " optimizer.momentum=0.5 optimizer.nesterov=false seed=3 threads=1 stages=2 hydra.run.dir=run"
)

OWN = """
import torch

from penstock.pipeline.samples import Description, Samples


def samples(device="cpu"):
    inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    targets = (inputs[:, 0] > 0).long()
    inputs[:, 1][inputs[:, 1] > 0.5] = float("nan")
    table = torch.utils.data.TensorDataset(inputs, targets)
    return Samples(train=table, test=table, describe=Description(num_classes=2, input_shape=(6,)))


class Net(torch.nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.wide = torch.nn.Linear(6, 4)
        self.narrow = torch.nn.Linear(4, num_classes)

    def forward(self, inputs):
        return self.narrow(torch.relu(self.wide(inputs)))
"""


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def refusal(typed, capfd):
    """The one sentence that a guarded run ends with."""
    assert command.run(["train", *typed.split(), "guard=true"]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert not Path("run/model.safetensors").exists()
    return error


def losses(folder="run"):
    return [json.loads(line)["loss"] for line in Path(f"{folder}/metrics.jsonl").read_text().splitlines()]


def test_a_learning_rate_that_explodes_is_told_by_its_first_layer(capfd):
    told = refusal(f"{JOB} ranks=1 optimizer.lr=1e30", capfd)
    assert "rank 0, stage " in told
    assert "guard=true refuses " in told
    assert "; lower the learning rate, or look at the data of this step" in told
    assert 0 < len(losses()) < 4


def test_a_run_that_stays_finite_is_the_same():
    found = []
    for guard in ("false", "true"):
        assert (
            command.run(["train", *JOB.split(), "ranks=1", f"guard={guard}", f"hydra.run.dir=guard_{guard}"])
            == 0
        )
        found.append(losses(f"guard_{guard}"))
    assert found[0] == found[1]


@pytest.fixture
def own(monkeypatch, tmp_path):
    """A module of the user's own, in the folder where the command is typed."""
    (tmp_path / "nans.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


JOB_OWN = (
    "model._target_=nans.Net data._target_=nans.samples batch_size=20 micro_batches=2 epochs=1 cuts=[relu]"
    " threads=1 hydra.run.dir=run"
)


@pytest.mark.usefixtures("own")
def test_a_nan_in_the_data_is_told_by_its_input_and_layer(capfd):
    told = refusal(f"{JOB_OWN} ranks=1", capfd)
    assert "rank 0, stage 0, forward of micro-batch 0, step 0: guard=true refuses NaN" in told
    assert "of that of layer wide, NaN first in the input inputs; lower" in told


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.usefixtures("own")
def test_ranks_end_with_the_sentence_of_the_rank_that_found_it(capfd):
    told = refusal(f"{JOB_OWN} ranks=2 deadline=60", capfd)
    assert "rank 0, stage 0, forward of micro-batch 0, step 0: guard=true refuses NaN" in told
    assert "of that of layer wide, NaN first in the input inputs; lower" in told
