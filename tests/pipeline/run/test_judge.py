"""Tests within an epoch, the checkpoint of the best one, and runs that end before their last step."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from commands import SMALL, lines, refusal, same_run, summary, train, trained

from penstock import ConfigError
from penstock.conf.schema import CheckpointConfig, EvalConfig, TrainConfig
from penstock.pipeline.run.training_loop import NOT_FINITE, Judge, check_samples

BEST = (
    f"{SMALL} batch_size=300 micro_batches=3 epochs=3 optimizer.lr=0.05 scheduler=none checkpoint.every=2"
    " eval.every=3 checkpoint.keep=2 checkpoint.best=loss stages=2 hydra.run.dir="
)


def losses_of_tests(folder):
    """Steps behind which there was a test, and its loss."""
    return {line["step"] + 1: line["test_loss"] for line in lines(folder) if "test_loss" in line}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_goes_on_tests_and_keeps_the_best_as_if_it_had_not_stopped(ranks):
    trained(f"{BEST}whole ranks={ranks}")
    found = losses_of_tests("whole")
    assert [*found] == [3, 4, 6, 8, 9, 12]
    best = f"step_{min(found, key=found.__getitem__):08}"
    kept = {path.name for path in Path("whole/checkpoints").iterdir()}
    assert kept == {"step_00000010", "step_00000012", best, "best"}
    assert Path("whole/checkpoints/best").resolve().name == best
    for stop in (3, 6):
        trained(f"{BEST}{stop} ranks={ranks} max_steps={stop}")
        Path(f"{stop}/summary.json").unlink()
        trained(f"{BEST}{stop} ranks={ranks} resume=auto")
        assert losses_of_tests(f"{stop}") == found
        assert same_run(f"{stop}", "whole")


def judge(told, **options):
    plan = SimpleNamespace(streams=options.pop("streams", False), num_stages=3)
    return Judge(TrainConfig(**options), plan, tell=told.append)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("metric", "results", "best"),
    [
        ("loss", [2.0, 0.0, 0.0, math.nan, -0.5], [1, 1, 0, 0, 1]),
        ("accuracy", [0.0, 0.5, 0.5, 0], [1, 1, 0, 0]),
    ],
)
def test_the_best_test_is_the_first_of_the_best(metric, results, best):
    told, options = [], {"checkpoint": CheckpointConfig(best=metric), "eval": EvalConfig(patience=2)}
    ours = judge(told, **options)
    for step, (result, is_best) in enumerate(zip(results, best, strict=True), start=1):
        again = judge(told, **options)
        again.load(json.loads(json.dumps(ours.state())))
        assert ours.test({metric: result}, step) == again.test({metric: result}, step) == is_best
        assert ours.state() == again.state()
        assert bool(ours.ended) == (step == 4)
        ours.ended = ""
    assert ours.test({metric: results[-1]}, len(results)) == best[-1]  # once more, by a run that goes on
    other = judge(told, checkpoint=CheckpointConfig(best="accuracy"))
    other.load(judge(told).state() | {"best": 0.1, "best_step": 3})  # by another result
    assert [other.test({"loss": loss}, 4) for loss in (2.0, 1.0)] == [True, True]
    assert "these tests have no accuracy" in told[-1]


@pytest.mark.parametrize(
    ("options", "at"),
    [({}, 1), ({"nan": "warn"}, None), ({"streams": True}, 4), ({"loss_scale": "dynamic"}, 11)],
)
def test_a_loss_that_is_no_number_is_told_once_and_ends_a_run(options, at):
    told, ended = [], None
    ours = judge(told, **options)
    for step, loss in enumerate((1.0, math.inf, *(math.nan,) * 12)):
        ours.step(SimpleNamespace(step=step, loss=loss))  # pyright: ignore[reportArgumentType]
        ended = step if ours.ended and ended is None else ended
    assert (ended, len(told)) == (at, 1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_loss_is_no_number_says_so_and_ends_with_a_code_of_its_own(ranks, capfd):
    wild = f"{SMALL} batch_size=200 max_steps=6 optimizer.lr=1e30 stages=2 ranks={ranks} hydra.run.dir="
    assert train(f"{wild}stops checkpoint.every=1") == NOT_FINITE
    out = " ".join(capfd.readouterr().out.split())
    steps = lines("stops")
    assert len(steps) < 6
    assert [step["loss"] is None for step in steps] == [False] * (len(steps) - 1) + [True]
    assert f"step {len(steps)}: the loss is nan, and the run ends; begin anew with a lower" in out
    assert f"ended early: step {len(steps)}: the loss is nan" in out
    assert f"step_{len(steps):08}" not in {path.name for path in Path("stops/checkpoints").iterdir()}
    trained(f"{wild}warns nan=warn")
    assert len(lines("warns")) == 6


def test_a_run_ends_after_tests_that_are_no_better(capfd):
    job = f"{SMALL} batch_size=200 epochs=9 optimizer.lr=1e-30 eval.every=2 ranks=1 stages=2 scheduler=none"
    trained(f"{job} eval.patience=2 hydra.run.dir=run")
    assert [*losses_of_tests("run")] == [2, 4, 6]
    assert "no better test in the last 2: loss " in summary("run")["ended_early"]
    nothing: Any = SimpleNamespace(test=None)
    with pytest.raises(ConfigError, match=r"eval\.every=2 needs samples to test on"):
        check_samples(TrainConfig(eval=EvalConfig(every=2)), nothing)
    streams = f"{job} schedule=async_1f1b checkpoint.best=loss hydra.run.dir=no"
    assert "checkpoint.best=loss depends on a test" in refusal(streams, capfd)
