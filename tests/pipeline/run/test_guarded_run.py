"""A run with guard=true ends with one sentence where a NaN begins, and with the same training else."""

from pathlib import Path

import pytest
from runs import SMALL, losses, refusal, trained

JOB = (
    f"{SMALL} batch_size=50 micro_batches=2 max_steps=4 optimizer.momentum=0.5 optimizer.nesterov=false"
    " ranks=1 stages=2 hydra.run.dir"
)

NANS = """
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


def test_a_learning_rate_that_explodes_is_told_and_a_run_that_stays_finite_is_the_same(capfd):
    told = refusal(f"{JOB}=exploded optimizer.lr=1e30 guard=true", capfd)
    assert "rank 0, stage " in told
    assert "guard=true refuses " in told
    assert "lower the learning rate" in told
    assert 0 < len(losses("exploded")) < 4
    assert not Path("exploded/model.safetensors").exists()
    for guard in ("false", "true"):
        trained(f"{JOB}=guard_{guard} guard={guard}")
    assert losses("guard_true") == losses("guard_false")


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_nan_in_the_data_is_told_by_the_rank_that_found_it_with_input_and_layer(ranks, capfd):
    Path("nans.py").write_text(NANS)
    job = "model._target_=nans.Net data._target_=nans.samples batch_size=20 micro_batches=2 epochs=1"
    told = refusal(f"{job} cuts=[relu] threads=1 guard=true ranks={ranks} deadline=60", capfd)
    assert "rank 0, stage 0, forward of micro-batch 0, step 0: guard=true refuses NaN" in told
    assert "of that of layer wide, NaN first in the input inputs" in told
