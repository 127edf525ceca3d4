"""All schedules, simulated: the numbers are those of the programs, and the choice is the best of them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from profiles import layer_of, profile_of, value_of

from penstock import PlanError, partition
from penstock.pipeline.run.schedule_comparison import SYNCHRONOUS, candidate, compare
from penstock.pipeline.schedules import SCHEDULES
from penstock.scripts import command


def even(num_layers, *, forward=10, backward=20, size=400, saved=1000):
    """Equal layers; nothing crosses a cut but 1,000 bytes each way."""
    work: dict[str, Any] = {"forward": forward, "backward": backward, "size": size, "saved": saved}
    layers = [layer_of(f"l{i}", **work) for i in range(num_layers)]
    return profile_of(layers, [value_of(i, [i + 1]) for i in range(num_layers - 1)])


def rows(found):
    return {one.name: one for one in found.candidates}


def test_every_schedule_but_a_custom_one_is_compared_where_the_counts_suit_all():
    found = compare(even(4), stages=4, ranks=2, micro_batches=8)
    assert set(rows(found)) == set(SYNCHRONOUS) | {"async_1f1b stashed", "1f1b double_buffered"}
    assert set(SYNCHRONOUS) == set(SCHEDULES) - {"async_1f1b", "custom"}
    assert not found.left_out


def test_what_does_not_suit_is_left_out_with_the_reason_and_what_suits_nothing_refused():
    found = compare(even(3), stages=3, ranks=2, micro_batches=2)
    assert found.left_out.keys() == {"interleaved", "zbv", "dualpipev", "1f1b double_buffered"}
    assert "take a multiple, such as stages=4" in found.left_out["interleaved"]
    assert "take stages=4" in found.left_out["zbv"]
    assert "raise micro_batches to 3" in found.left_out["1f1b double_buffered"]
    with pytest.raises(PlanError, match="2 stages need at least as many layers"):
        compare(even(1), stages=2, micro_batches=2)


# ranks 4, F 10 ms, B 20 ms, 8 micro-batches: (8 + 3) x 30 ms; a stream takes 8 x 30 ms.
def test_seconds_and_bubbles_of_even_stages_are_the_textbook_ones():
    found = rows(compare(even(4), stages=4, micro_batches=8))
    for name in ("gpipe", "1f1b"):
        assert found[name].seconds == pytest.approx(0.330)
        assert found[name].bubble == pytest.approx(3 / 11)
    for name in ("async_1f1b stashed", "1f1b double_buffered"):
        assert found[name].seconds == pytest.approx(0.240)
        assert found[name].bubble == pytest.approx(0.0, abs=1e-9)
    assert found["zb_h1"].seconds < 0.310


@pytest.mark.parametrize(
    ("stages", "ranks", "micro_batches"), [(2, 2, 2), (4, 2, 4), (3, 3, 5), (6, 3, 6), (4, 1, 3)]
)
def test_a_stream_is_full_whatever_the_counts(stages, ranks, micro_batches):
    found = compare(even(stages), stages=stages, ranks=ranks, micro_batches=micro_batches)
    one = rows(found)["async_1f1b stashed"]
    slowest = 0.030 * stages / ranks
    assert one.seconds == pytest.approx(micro_batches * slowest)
    assert one.bubble == pytest.approx(0.0, abs=1e-9)


def test_memory_is_parameters_thrice_old_versions_and_what_is_in_flight():
    found = rows(compare(even(2), stages=2, micro_batches=6))
    assert found["gpipe"].memory == (3 * 400 + 6 * 1000, 3 * 400 + 6 * 1000)
    assert found["1f1b"].memory == (3 * 400 + 2 * 1000, 3 * 400 + 1000)
    assert found["async_1f1b stashed"].memory == (4 * 400 + 2 * 1000, 3 * 400 + 1000)
    assert found["1f1b double_buffered"].memory == (4 * 400 + 2 * 1000, 4 * 400 + 1000)


@pytest.mark.parametrize("exact", [False, True])
def test_replicas_are_compared_with_what_they_exchange(exact):
    found = compare(even(2), stages=2, ranks=3, micro_batches=6, replicas="auto", exact=exact)
    assert set(rows(found)) == {"gpipe", "1f1b", "zb_h1"}
    for one in found.candidates:
        planned = [stage.memory_bytes for stage in one.plan.stages for _ in stage.ranks]
        assert list(one.memory) == planned, one.name
        assert sum(span.op == "U" for span in one.panel.spans) == 2  # of the two replicas
    assert "replicas=auto divides ranks over stages that each have ranks" in found.left_out["zbv"]


def test_memory_knows_the_optimizer_and_what_a_tier_leaves():
    layers = [layer_of(f"l{i}", size=400, saved=1000, packed=200) for i in range(2)]
    profile = profile_of(layers, [value_of(0, [1])])
    found = rows(compare(profile, stages=2, micro_batches=6, optimizer_state=2.0, tier="packed"))
    assert found["gpipe"].memory == (4 * 400 + 2 * 1000 + 6 * 200,) * 2
    assert found["1f1b"].memory == (4 * 400 + 2 * 1000, 4 * 400 + 1000)
    assert found["async_1f1b stashed"].memory == (5 * 400 + 2 * 1000, 4 * 400 + 1000)
    for one in found.values():
        if one.plan.ranks == (0, 1):
            assert one.memory == tuple(stage.memory_bytes for stage in one.plan.stages), one.name


def test_every_stage_counts_in_its_own_tier():
    layers = [layer_of(f"l{i}", saved=1000, packed=200) for i in range(2)]
    profile = profile_of(layers, [value_of(0, [1])])
    plan = partition(profile, stages=2, micro_batches=6, schedule="gpipe")
    stages = plan.stages[0], dataclasses.replace(plan.stages[1], tier="packed")
    assert candidate(profile, dataclasses.replace(plan, stages=stages)).memory == (6000, 2000 + 6 * 200)


def test_an_option_names_the_optimizer_whose_memory_is_planned(tmp_path):
    job = "plan model=mlp model.hidden=[16] data.size=8 data.channels=1 threads=1 batch_size=8 cuts=[_1]"
    planned = {}
    for name in ("sgd", "adamw"):
        assert command.run([*job.split(), f"optimizer={name}", f"hydra.run.dir={name}"]) == 0
        planned[name] = json.loads((tmp_path / name / "plan.json").read_text())["stages"]
    for sgd, adamw in zip(planned["sgd"], planned["adamw"], strict=True):
        assert adamw["memory_bytes"] - sgd["memory_bytes"] == 4 * sgd["num_parameters"]


@pytest.mark.parametrize("stages", [2, 4])
def test_planned_memory_is_never_below_what_the_programs_need(stages):
    """The planner weighs memory before there is a program; for one stage a rank both agree."""
    for one in compare(even(4), stages=stages, ranks=2, micro_batches=8).candidates:
        planned = [0] * one.plan.num_ranks
        for stage, rank in zip(one.plan.stages, one.plan.ranks, strict=True):
            planned[rank] += stage.memory_bytes
        assert all(mine <= theirs for mine, theirs in zip(one.memory, planned, strict=True)), one.name
        if stages == 2:
            assert list(one.memory) == planned, one.name


def test_the_fastest_synchronous_schedule_is_chosen_however_fast_a_stream_is():
    found = compare(even(4), stages=4, micro_batches=8)
    fastest = min(found.candidates, key=lambda one: one.seconds)
    assert fastest.plan.streams
    others = [one for one in found.candidates if not one.plan.streams]
    assert found.chosen.seconds == pytest.approx(min(one.seconds for one in others))
    assert not found.chosen.plan.streams


def test_of_two_as_fast_the_smaller_is_chosen():
    found = compare(even(4), stages=4, micro_batches=8)
    two = tuple(one for one in found.candidates if one.name in ("gpipe", "1f1b"))
    assert dataclasses.replace(found, candidates=two).chosen.name == "1f1b"
    assert dataclasses.replace(found, candidates=two[::-1]).chosen.name == "1f1b"


def test_what_does_not_fit_is_not_chosen():
    free = compare(even(4, size=0), stages=4, micro_batches=8)
    least = min(max(one.memory) for one in free.candidates if not one.plan.streams)
    tight = compare(even(4, size=0), stages=4, micro_batches=8, memory=least * 105 // 100)
    assert "gpipe" in tight.left_out
    assert max(tight.chosen.memory) == least
    assert tight.chosen.fits
    almost = least * 105 // 100 - 1, 0, 0, 0  # within the budget, and not with its margin
    assert not dataclasses.replace(tight.chosen, memory=almost).fits
    with pytest.raises(PlanError, match="smallest budget"):
        compare(even(4), stages=4, micro_batches=8, memory=100)


# rank 0   F0 F1 at 0-20, B0 at 80 (F0 arrives at 30, its gradient at 80), F2 B1 F3, B2 at 180, B3 at 210-230
def test_tensors_take_their_time_on_a_slow_link():
    found = compare(even(2), stages=2, micro_batches=4, link=400_000)  # 20 ms for 1,000 bytes
    assert rows(found)["1f1b"].seconds == pytest.approx(0.230)


def test_plan_schedule_all_shows_chooses_and_writes(capsys):
    job = "model=mlp model.hidden=[16,16,16] data.size=8 data.channels=1 threads=1 batch_size=32"
    options = f"{job} ranks=2 stages=4 schedule=all hydra.run.dir=run"
    assert command.run(["plan", *options.split()]) == 0
    out = capsys.readouterr().out.splitlines()
    (chosen,) = [line.split()[0] for line in out if line.endswith("<- chosen")]
    folder = Path("run")
    assert json.loads((folder / "plan.json").read_text())["schedule"] == chosen
    assert f"schedule: {chosen}" in (folder / "config.yaml").read_text()
    assert (folder / "schedules.png").read_bytes().startswith(b"\x89PNG")
    rows = json.loads((folder / "schedules.json").read_text())["schedules"]
    assert [row["schedule"] for row in rows if row["chosen"]] == [chosen]
    assert out[-1] == "run/schedules.png"
