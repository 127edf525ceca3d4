"""``ranks=auto`` and ``micro_batches=auto``: the shortest simulated step, and then a run like any other."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import SMALL, refusal, same_model, trained
from profiles import layer_of, profile_of, value_of

from penstock import PlanError, partition
from penstock.conf.schema import MemoryConfig, PlanConfig
from penstock.pipeline.run import counts
from penstock.pipeline.run.schedule_comparison import candidate
from penstock.scripts import command

JOB = f"{SMALL} batch_size=24 epochs=1 max_steps=6 codec=zero_value"


def measured(fixed, each):
    """Return what stands for a measurement: 6 equal layers of ``fixed + each * samples`` milliseconds."""

    def profile(config, samples, micro_batches):
        size = -(-config.batch_size // micro_batches)
        times = {"forward": fixed + each * size, "backward": 2 * (fixed + each * size)}
        layers = [layer_of(f"l{i}", **times, size=400, saved=100 * size) for i in range(6)]
        values = [value_of(i, [i + 1], 10 * size) for i in range(5)]
        return dataclasses.replace(profile_of(layers, values), num_samples=size)

    return profile


def chosen(monkeypatch, fixed, each, **options):
    """Choose, and return the numbers with the best of all by brute force."""
    profile: Any = measured(fixed, each)
    monkeypatch.setattr(counts, "_measured", profile)
    monkeypatch.setattr(counts, "cores", lambda: 4)
    asked: dict[str, Any] = {"ranks": "auto", "micro_batches": "auto", "threads": 1} | options
    config, seconds = PlanConfig(batch_size=64, **asked), {}
    if "ranks" in config.searched:
        config.ranks = 4
    for micro_batches in (1, 2, 4, 8, 16, 32, 64) if "micro_batches" in config.searched else (8,):
        for ranks in (1, 2, 3, 4) if "ranks" in config.searched else (config.ranks,):
            made = profile(config, None, micro_batches)
            plan = partition(made, ranks=ranks, micro_batches=micro_batches)
            seconds[ranks, micro_batches] = candidate(made, plan).seconds
    said = counts.choose(config, Path)  # pyright: ignore[reportArgumentType]
    assert config.searched == ()
    return (config.ranks, config.micro_batches), seconds, said


@pytest.mark.parametrize(("fixed", "each"), [(0, 1), (1, 1), (8, 1), (100, 1), (1000, 0)])
@pytest.mark.parametrize("options", [{}, {"ranks": 3}, {"micro_batches": 8}])
def test_the_numbers_are_those_of_the_shortest_step(fixed, each, options, monkeypatch):
    numbers, seconds, said = chosen(monkeypatch, fixed, each, **options)
    least = min(seconds.values())
    assert seconds[numbers] <= least * counts.EQUAL * 1.001
    equals = [pair for pair, one in seconds.items() if one <= least * counts.EQUAL * 0.999]
    assert numbers <= min(equals)
    assert said is not None
    assert f"is the best of {len(seconds)} simulated" in said


def test_what_costs_the_same_for_any_size_gets_few_micro_batches_and_what_does_not_gets_many(monkeypatch):
    assert chosen(monkeypatch, 1000, 0, ranks=1)[0][1] == 1
    assert chosen(monkeypatch, 0, 1, ranks=4)[0][1] == 64


def test_a_model_that_takes_no_micro_batch_of_one_sample_is_measured_at_larger_ones(monkeypatch):
    whole: Any = measured(0, 1)

    def refuses(config, samples, micro_batches):
        if -(-config.batch_size // micro_batches) < 4:
            raise PlanError("too few for a batch norm")
        return whole(config, samples, micro_batches)

    asked: Any = {"ranks": 4, "micro_batches": "auto", "extra_in_flight": 0, "threads": 1}
    config = PlanConfig(batch_size=64, **asked)
    monkeypatch.setattr(counts, "_measured", refuses)
    counts.choose(config, Path)  # pyright: ignore[reportArgumentType]
    assert config.micro_batches == 16


def test_nothing_that_does_not_fit_is_chosen(monkeypatch):
    with pytest.raises(PlanError, match="smallest budget"):
        chosen(monkeypatch, 0, 1, memory=MemoryConfig(device=100))


def test_a_run_with_chosen_numbers_is_the_run_with_these_and_goes_on_with_them():
    trained(f"{JOB} ranks=auto micro_batches=auto checkpoint.every=3 checkpoint.keep=9 hydra.run.dir=chosen")
    plan = json.loads(Path("chosen/plan.json").read_text())
    numbers = f"ranks={len(plan['stages'])} micro_batches={plan['micro_batches']} threads=1"
    for name in ("micro_batches", "ranks"):
        assert f"\n{name}: auto" not in Path("chosen/config.yaml").read_text()
    trained(f"{JOB} {numbers} hydra.run.dir=given")
    assert same_model("chosen", "given")
    for left in ("summary.json", "model.safetensors"):  # as a run that was killed behind step 3
        Path("chosen", left).unlink()
    shutil.rmtree("chosen/checkpoints/step_00000006")
    trained(f"{JOB} ranks=auto micro_batches=auto resume=auto hydra.run.dir=chosen")
    assert same_model("chosen", "given")
    trained(f"{JOB} ranks=auto micro_batches=auto plan=given/plan.json hydra.run.dir=planned")
    assert same_model("planned", "given")


def test_what_cannot_be_chosen_is_one_sentence(capsys, monkeypatch):
    assert "ranks=some must be auto, or 1 or more" in refusal(f"{JOB} ranks=some", capsys)
    assert "micro_batches=0 must be auto, or 1 or more" in refusal(f"{JOB} micro_batches=0", capsys)
    for option in ("min_ranks=2", "replicas.threads=true"):
        said = refusal(f"{JOB} ranks=auto {option}", capsys)
        assert f"{option} is for a number of ranks, found ranks=auto; give the number" in said
    said = refusal(f"{SMALL} cluster=c.yaml ranks=auto", capsys, name="plan")
    assert "cluster=c.yaml has its ranks, found ranks=auto; drop either" in said
    assert command.run(["plan", *f"{SMALL} ranks=auto batch_size=24 hydra.run.dir=one".split()]) == 0
    assert "ranks=" in capsys.readouterr().err
    again = f"{SMALL} batch_size=24 profile=one/profile.json"
    assert command.run(["plan", *f"{again} ranks=auto hydra.run.dir=two".split()]) == 0
    assert "measures the model at two sizes" in refusal(f"{again} micro_batches=auto", capsys, name="plan")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "micro_batches=auto is for ranks that penstock starts" in refusal(
        f"{JOB} micro_batches=auto", capsys
    )
