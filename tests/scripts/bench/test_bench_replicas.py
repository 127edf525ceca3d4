"""penstock bench replicas: what rows make of runs, what is refused, and a small one that really runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from profiles import layer_of, profile_of, value_of

from penstock import ConfigError
from penstock.conf.bench_replicas import BenchReplicasConfig
from penstock.pipeline.schedules.span import Span
from penstock.scripts import command
from penstock.scripts.bench import replicas_sides as sides
from penstock.scripts.bench import topics
from penstock.scripts.bench.replicas_bench import figure, plans_of
from penstock.scripts.bench.replicas_rows import byte_rows, cells, speed_rows, turn_rows
from penstock.scripts.bench.replicas_side import seconds_of_updates

pytestmark = pytest.mark.slow  # what it tests is a tool of maintainers

PROFILE = profile_of(
    [layer_of(f"l{i}", forward=1, backward=2, size=400) for i in range(6)],
    [value_of(i, [i + 1]) for i in range(-1, 6)],
)
CONFIG = BenchReplicasConfig(batch_size=100, micro_batches=4, factors=[1, 3])
PLANS = plans_of(CONFIG, PROFILE)
SPEEDS = {
    "1": {sides.ALONE: [[100.0, 100.0], [50.0, 50.0], [60.0, 40.0]], sides.EVEN: [0.5, 1.0, 2.0]},
    "3": {sides.ALONE: [[90.0, 30.0]], sides.EVEN: [2.0]},
}
TURNS = {
    "a": {"seconds": [1.0, 2.0, 6.0], "simulated": 0.5, "update": 0.01},
    "b": {"seconds": [0.5, 2.0, 2.0], "simulated": 0.4, "update": 0.02},
}
BYTES = {
    sides.EVEN: {
        "activations": 0,
        "gradients": 0,
        "exchange_of_ranks": [1600, 1600, 0],
        "total_of_ranks": [1700, 1650, 0],
        "parameters": [1600],
    },
    sides.THREE: {
        "activations": 100,
        "gradients": 50,
        "exchange_of_ranks": [0, 0, 0],
        "total_of_ranks": [90, 60, 40],
        "parameters": [400, 400, 800],
    },
}


def test_the_share_is_that_of_the_speeds_beside_it():
    first, second = speed_rows(SPEEDS, PLANS, CONFIG)
    assert first["share_of_pairs"] == pytest.approx([1.0, 1.0, 0.5])
    assert (first["share"], first["bound"], second["bound"]) == (1.0, 1.0, 0.5)
    assert second["share"] == pytest.approx(50 / 120)
    shown = cells(second)
    assert (shown["speeds"], shown["share"], shown["at most"]) == ("1:3", "42% (42%-42%)", "50%")


def test_turns_are_compared_with_their_neighbours():
    plans = dict.fromkeys("ab", PLANS[sides.TWO])
    first, second = turn_rows(TURNS, plans, CONFIG)
    assert (first["speedup"], second["speedup_of_pairs"]) == (1.0, [2.0, 1.0, 3.0])
    assert (second["seconds"], second["speedup"], second["ranks"]) == (2.0, 2.0, 2)
    assert cells(second)["as fast"] == "2.00x (1.00-3.00)"
    assert 0 < first["predicted"] < 1


def test_bytes_that_are_no_frames_and_no_exchange_are_the_rest():
    even, three = byte_rows(BYTES, PLANS, CONFIG)
    assert (even["exchange"], even["total"], even["rest"], even["of_parameters"]) == (3200, 3350, 150, 2.0)
    assert (three["exchange"], three["rest"], three["of_parameters"]) == (0, 40, None)
    assert cells(three)["of the parameters"] == "-"


def test_an_update_takes_what_it_takes_where_nobody_waits():
    spans = [
        Span(rank=rank, stage=stage, op="U", micro_batch=None, start=1.0, waiting=0.0, end=1.0 + seconds)
        for rank, stage, taken in [(0, 0, [9.0, 3.0]), (1, 0, [2.0, 8.0]), (2, 1, [0.5, 0.5])]
        for seconds in taken
    ]
    assert seconds_of_updates(spans) == pytest.approx(2.5)


def test_bars_stand_beside_each_other():
    results = {
        "speeds": speed_rows(SPEEDS, PLANS, CONFIG),
        "stages": turn_rows(TURNS, dict.fromkeys("ab", PLANS[sides.TWO]), CONFIG),
        "bytes": byte_rows(BYTES, PLANS, CONFIG),
    }
    axes = figure(results).axes
    assert len(axes) == 3
    for panel in axes:
        first, second = [bars for bars in panel.containers if hasattr(bars, "patches")][:2]
        assert first[0].get_x() + first[0].get_width() <= second[0].get_x()


def test_shares_by_speed_are_as_near_as_micro_batches_let_them():
    assert [sides.dealt(factor, 12) for factor in (1, 2, 4, 8, 99)] == [
        [6, 6],
        [8, 4],
        [10, 2],
        [11, 1],
        [11, 1],
    ]
    assert [sides.even_share(factor) for factor in (1, 3)] == [1.0, 0.5]


def test_sides_that_are_compared_are_cut_alike():
    assert PLANS[sides.SAME].cuts == PLANS[sides.BESIDE].cuts == PLANS[sides.BESIDE_EXACT].cuts
    assert PLANS[sides.SAME].cuts != PLANS[sides.TWO].cuts
    assert [PLANS[name].replicas for name in (sides.EVEN, sides.BESIDE, sides.SAME)] == [(2,), (1, 2), (1, 1)]
    assert PLANS[sides.BESIDE_EXACT].exact
    only = plans_of(BenchReplicasConfig(parts=["stages"], batch_size=100, micro_batches=4), PROFILE)
    assert sorted(only) == sorted(sides.PARTS["stages"])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"repeats": 0}, "repeats=0 must be 1 or more"),
        ({"micro_batches": 1}, "micro_batches=1 must be 2 or more"),
        ({"factors": [0]}, "factors=0 must be 1 or more"),
        ({"factors": []}, r"factors=\[\] must name one or more, each once"),
        ({"seconds": 0.0}, "seconds=0.0 must be above 0"),
        ({"parts": ["bytes", "bytes"]}, r"parts=\[bytes,bytes\] must name one or more, each once"),
        ({"parts": ["bits"]}, "parts=\\[bits\\] holds bits, which is not known; known are speeds, stages"),
        ({"batch_size": 3}, "too small for micro_batches=12"),
    ],
)
def test_what_does_not_fit_is_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        topics.replicas(BenchReplicasConfig(**given))


@pytest.mark.slow
@pytest.mark.ranks
def test_a_small_one_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    job = (
        "model=mlp model.hidden=[64,48,32] data.size=8 data.channels=1 batch_size=48 micro_batches=6 steps=1"
    )
    asked = "factors=[1,4] repeats=2 seconds=0.2 hydra.run.dir=run"
    assert command.run(["bench", "replicas", *job.split(), *asked.split()]) == 0
    out = capfd.readouterr().out
    for word in ("of the parameters", "1:4", "[1, 2] exact", "two stages, cut as [1, 2]"):
        assert word in out
    results = json.loads(Path("run/results.json").read_text())
    shown = [(row["side"], row["factor"]) for row in results["speeds"]]
    assert shown == [(side, factor) for factor in (1, 4) for side in (sides.EVEN, sides.WEIGHTED)]
    assert all(row["share"] > 0 for row in results["speeds"])
    found = {row["side"]: row for row in results["bytes"]}
    assert found[sides.EVEN]["of_parameters"] == pytest.approx(
        2, rel=0.05
    )  # a ring of two: each sends all once
    assert found[sides.EXACT]["of_parameters"] == pytest.approx(6 / 2 + 1, rel=0.05)
    assert found[sides.EVEN]["activations"] == found[sides.THREE]["exchange"] == 0
    assert found[sides.THREE]["activations"] > 0
    for row in found.values():
        assert 0 <= row["rest"] < 30_000
    assert len(results["stages"]) == 4
    assert sorted(path.name for path in Path("run").iterdir()) == ["results.json", "results.png"]
