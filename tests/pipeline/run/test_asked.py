"""Runs that are asked to stop finish their step, keep it, and go on with the same bits (SIGTERM, SIGUSR1)."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from faults import ended, started
from processes import ranks_in
from reference import same_bits
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.ranks]


def lines(folder):
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    return [(line["step"], line["loss"]) for line in lines(folder)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody asked."""
    folder = tmp_path_factory.mktemp("whole")
    code, _, error, _ = ended(started(folder, "ranks=1 stages=2 hydra.run.dir=run"))
    assert code == 0, error
    return folder / "run"


@pytest.mark.parametrize(
    ("fault", "more", "number"),
    [
        ("0 read 61 SIGTERM", "ranks=1 stages=2", signal.SIGTERM),
        ("0 read 121 SIGUSR1", "ranks=2", signal.SIGUSR1),
        ("1 forward 5 SIGTERM", "ranks=2", signal.SIGTERM),
        ("1 read 61 SIGTERM@launcher", "ranks=3", signal.SIGTERM),
        ("0 read 121 SIGTERM", "ranks=2 replicas.threads=true", signal.SIGTERM),
        (
            "0 test 1 SIGTERM",
            "ranks=2 batch_size=5",
            signal.SIGTERM,
        ),  # every tenth batch of a test they agree
    ],
)
def test_a_run_that_is_asked_to_stop_keeps_its_step_and_goes_on(fault, more, number, whole, tmp_path):
    if "batch_size" in more:
        whole = tmp_path / "other"
        assert ended(started(tmp_path, f"{more} hydra.run.dir=other"))[0] == 0
    code, out, error, _ = ended(started(tmp_path, f"{more} hydra.run.dir=run", fault=fault))
    assert code == 128 + number, out + error
    done = len(lines(tmp_path / "run"))
    assert 0 < done < len(lines(whole))
    told = (
        f"penstock: stopped by {number.name}; {tmp_path}/run keeps a checkpoint, step_{done:08}; go on from"
    )
    assert error.splitlines()[-1].startswith(told), error
    assert error.endswith("resume=auto\n")
    assert error.count("\n") == 1
    assert not ranks_in(tmp_path / "run")
    assert not (tmp_path / "run" / "errors").exists()
    if fault.startswith("0 test"):
        assert "epoch 1/4" not in out
    code, out, error, _ = ended(started(tmp_path, f"{more} hydra.run.dir=run resume=auto"))
    assert code == 0, error
    assert losses(tmp_path / "run") == losses(whole)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "run", whole))
    assert all(same_bits(ours[name], theirs[name]) for name in theirs)


def test_a_stream_is_stopped_at_the_checkpoint_that_was_asked_for(tmp_path):
    more = "ranks=1 stages=2 schedule=async_1f1b weights=stashed checkpoint.every=2 hydra.run.dir=run"
    code, out, error, _ = ended(started(tmp_path, more, fault="0 forward 9 SIGTERM"))
    assert code == 143, out + error
    assert "keeps a checkpoint, step_00000002;" in error, error
    assert len(lines(tmp_path / "run")) == 3


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_request_ends_at_once(ranks, tmp_path):
    """The rank sleeps in a layer, so that its step never ends; a second SIGTERM is another."""
    fault = f"{ranks - 1} forward 5 sleep"
    process = started(tmp_path, f"ranks={ranks} stages=2 hydra.run.dir=run", fault=fault)
    assert process.stdout is not None
    assert any("sleeps" in line for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(Exception, match="timed out"):
        process.wait(timeout=2)
    process.send_signal(signal.SIGTERM)
    code, _, error, _ = ended(process, seconds=60)
    assert code == 143
    assert "stopped by SIGTERM" in error
    assert "start it again from the beginning" in error
    assert not ranks_in(tmp_path / "run")
