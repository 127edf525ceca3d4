"""A run with detect_anomaly=true ends with one sentence where a NaN begins."""

from pathlib import Path

import pytest
from commands import OWN, SMALL, losses, refusal

JOB = (
    f"{SMALL} batch_size=50 micro_batches=2 max_steps=4 optimizer.momentum=0.5 optimizer.nesterov=false"
    " ranks=1 stages=2 optimizer.lr=1e30 detect_anomaly=true"
)


def test_a_learning_rate_that_explodes_is_told(capfd):
    told = refusal(f"{JOB} hydra.run.dir=exploded", capfd)
    assert "rank 0, stage " in told
    assert "detect_anomaly=true refuses " in told
    assert "lower the learning rate" in told
    assert 0 < len(losses("exploded")) < 4
    assert not Path("exploded/model.safetensors").exists()


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_nan_in_the_data_is_told_by_the_rank_that_found_it_with_input_and_layer(ranks, capfd):
    Path("own.py").write_text(OWN)
    job = "model._target_=own.Net data._target_=own.samples data.nans=true batch_size=20 micro_batches=2"
    told = refusal(f"{job} cuts=[relu] threads=1 detect_anomaly=true ranks={ranks} deadline=60", capfd)
    assert "rank 0, stage 0, forward of micro-batch 0, step 0: detect_anomaly=true refuses NaN" in told
    assert "of that of layer wide, NaN first in the input inputs" in told
