"""A run within a share of the memory that it needs: the same model, and a table of what every tier held."""

import dataclasses
from pathlib import Path

import pytest
from commands import refusal, summary, trained
from reports import PLAN, report

from penstock.pipeline.run import metrics, tables
from penstock.pipeline.run.metrics import MOST, SUMS
from penstock.pipeline.runtime.report import StageReport
from penstock.stages.memory.parameter_offload import OffloadedParameters

JOB = (
    "model=mlp model.hidden=[256,256,256,256,256,256] data.size=8 data.channels=1 batch_size=600"
    " micro_batches=6 max_steps=4 epochs=1 optimizer=adamw seed=3 threads=1 codec=zero_value"
)

MIB = 1 << 20


def model_of(options, folder):
    trained(f"{JOB} {options} hydra.run.dir={folder}")
    return Path(folder, "model.safetensors").read_bytes()


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_quarter_of_the_memory_gives_the_same_model_and_says_what_it_held(ranks, capfd):
    options = f"ranks={ranks} stages=2 schedule=gpipe"
    whole = model_of(options, "whole")
    assert "predicted" not in capfd.readouterr().out
    less = model_of(f"{options} memory.device=45%", "less")
    said = capfd.readouterr().out
    assert less == whole
    for rank in range(ranks):
        assert f"rank {rank} will hold at most, by its first step: device" in said
        assert said.index(f"rank {rank} will hold") < said.index("epoch 1/1")
    assert "budget  predicted" in said
    rows = summary("less")["tiers"]
    assert {(row["rank"], row["tier"]) for row in rows} >= {(rank, "device") for rank in range(ranks)}
    assert any(row["tier"] == "disk" and row["exposed_seconds"] > 0 for row in rows)
    for row in rows:
        assert 0 < row["peak_bytes"] <= row["predicted_peak_bytes"] + MIB  # that may wait to be written
        if row["tier"] == "device":
            assert row["peak_bytes"] <= row["budget_bytes"] + 2 * MIB  # and frames between stages, of 1.2


def test_without_a_disk_what_fits_nowhere_is_refused_with_the_least_that_does(capfd):
    said = refusal(f"{JOB} ranks=1 stages=2 memory.device=20% memory.disk=0", capfd)
    assert "the smallest budget that does is memory=" in said
    assert "disk" not in said


def test_a_process_that_holds_more_than_its_budget_is_named_once():
    told = []
    see = tables.overrun(dataclasses.replace(PLAN, memory=100 * MIB), told.append)
    for resident in (174 * MIB, 175 * MIB, 300 * MIB):  # 1.1 times as much, and 64 MiB
        stages = StageReport(rank=1, resident_bytes=resident), StageReport(rank=0, resident_bytes=MIB)
        see(dataclasses.replace(report(), stages=stages))
    assert [line.partition(" more")[0] for line in told] == ["rank 1 holds 175 MiB"]
    without = tables.overrun(dataclasses.replace(PLAN, memory=None), told.append)
    without(dataclasses.replace(report(), stages=stages))
    assert len(told) == 1


@pytest.mark.parametrize(
    ("memory", "packed", "said"),
    [
        (None, 0, []),
        (None, 20, ["rank 0 {}: device 130 B, packed 20 B", "rank 1 {}: device 7 B"]),
        (999, 0, ["rank 0 {}: device 130 B", "rank 1 {}: device 7 B"]),
    ],
)
def test_the_first_step_foretells_what_the_closing_table_will_show(memory, packed, said):
    told, plan = [], dataclasses.replace(PLAN, memory=memory)
    see = tables.foretell(plan, told.append)
    first = dataclasses.replace(report(), stages=(
        StageReport(rank=1, device_tier=7),
        StageReport(rank=0, device_tier=100, packed_tier=packed, grew_bytes=30),
    ))  # fmt: skip
    see(first)
    see(first)
    assert told == [line.format("will hold at most, by its first step") for line in said]
    total = dict.fromkeys((*SUMS, *MOST), 0) | {"device_tier": 100, "packed_tier": packed}
    rows = metrics.tier_rows([total], [], [0], plan)
    assert (tables.tier_table({"tiers": rows, "steps": 1}) is not None) == bool(said)


def test_a_mirror_is_not_brought_back_to_be_written(monkeypatch):
    """At the end of a run less is near than all: its tensors go to the file one by one."""
    monkeypatch.setattr(OffloadedParameters, "pull_all", None)
    assert model_of("ranks=1 stages=2 memory.parameters=disk", "mirrored") == model_of(
        "ranks=1 stages=2", "whole"
    )
