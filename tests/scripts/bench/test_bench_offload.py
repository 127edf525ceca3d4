"""penstock bench offload: steps beside their bound, limits that the system holds, small ones really run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from law import everything_leaves

from penstock import ConfigError, PlanError
from penstock.compression.errors import PenstockError, TransportError
from penstock.conf.bench_offload import BenchOffloadConfig
from penstock.pipeline.planner.partition import partition
from penstock.pipeline.run.decide import look, prepare
from penstock.pipeline.run.run_folder import RunFolder
from penstock.scripts import command
from penstock.scripts.bench import (
    memory_group,
    offload_disk,
    offload_packed,
    offload_placement,
    offload_sides,
    offload_turn,
    topics,
)
from penstock.scripts.bench.offload_bench import figure
from penstock.scripts.bench.offload_disk import SPEED, found, planned, sides_of
from penstock.scripts.bench.offload_sides import LIMIT, bytes_of, filled
from penstock.scripts.bench.offload_start import run

pytestmark = pytest.mark.slow  # what it tests is a tool of maintainers

MLP = {"_target_": "penstock.pipeline.models.mlp", "hidden": [1024, 1024]}
DIGITS = {"_target_": "penstock.pipeline.samples.digits.load", "size": 8, "channels": 1}
SGD = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9}


def ran(seconds: float, *, written: int = 0, read: int = 0, peak: int = 9, losses: str = "0x1p0") -> dict:
    moved = {"bytes_written": written, "bytes_read": read, "peak_bytes": peak}
    return {"seconds": seconds, "losses": [losses], "direct": None} | moved


def taken(**others) -> dict:
    speeds = [
        {"written": 100.0, "read": 50.0, "direct": True},
        {"written": 200.0, "read": 50.0, "direct": True},
    ]
    kept = {("kept", None): [ran(2.0), ran(1.0)], ("kept_as_it_comes", None): [ran(1.0), ran(3.0)]}
    return kept | {(name, "50%"): runs for name, runs in others.items()} | {SPEED: speeds}


def given(of: dict) -> dict:
    return {side: 5 if side[1] else None for side in of if side != SPEED}


def test_the_bound_is_the_largest_of_computing_writing_and_reading():
    sides = taken(
        computing=[ran(2.0, written=90, read=40), ran(2.0, written=90, read=40)],
        writing=[ran(6.0, written=300, read=50), ran(3.0, written=300, read=50)],
        reading=[ran(8.0, written=300, read=200), ran(8.0, written=300, read=200)],
    )
    rows = {row["contestant"]: row for row in found(sides, given(sides), {})["rows"]}
    assert [rows[name]["roofline"] for name in ("computing", "writing", "reading")] == [1.0, 2.25, 4.0]
    assert rows["writing"]["times_roofline_of_runs"] == [2.0, 2.0]
    assert rows["reading"]["times_roofline"] == 2.0
    assert rows["computing"]["times_compute"] == 2.0  # the faster of what keeps everything
    assert rows["kept"]["times_roofline_of_runs"] == [2.0, 1.0]
    assert (rows["writing"]["limit"], rows["writing"]["limit_bytes"]) == ("50%", 5)


def test_who_was_killed_has_no_seconds_and_the_table_says_so():
    sides = taken(disk=[{"killed": True, "steps": 2}] * 2)
    result = found(sides, given(sides), {"50%": {"killed": True, "steps": 0}, "90%": ran(1.0)})
    assert result["rows"][2] == {
        "contestant": "disk", "limit": "50%", "limit_bytes": 5, "killed": True, "steps": 2,
    }  # fmt: skip
    assert offload_disk.rows(result)[2] == {"contestant": "disk in 50%", "s / step": "killed behind step 2"}
    speed, *kept = offload_disk.sentences(result)
    assert "150 B/s written, 50 B/s read" in speed
    assert kept == [
        "everything kept within 50% was killed behind step 0",
        "everything kept within 90% trains too",
    ]


def test_sides_that_train_otherwise_are_refused():
    sides = taken(disk=[ran(1.0), ran(1.0, losses="0x1p1")])
    with pytest.raises(TransportError, match="disk has other losses"):
        found(sides, given(sides), {})


def test_every_contestant_runs_within_every_limit_and_what_keeps_everything_without():
    assert sides_of(["disk", "kept"], [None, "50%"]) == [
        ("kept", None), ("kept_as_it_comes", None), ("disk", None), ("disk", "50%"),
    ]  # fmt: skip


def test_a_limit_is_bytes_or_a_share():
    assert (bytes_of(None, 7), bytes_of("50%", 7), bytes_of("1KiB", 7), bytes_of(12, 7)) == (
        None,
        3,
        1024,
        12,
    )
    assert bytes_of("12.5%", 1000) == 125
    assert bytes_of("1%", 7) == 1


def test_a_budget_is_a_share_of_the_limit_and_without_one_there_is_no_contestant():
    auto = {"partition": {"memory": LIMIT, "tier": "packed"}}
    assert filled(auto, 400 << 20) == {"partition": {"memory": 280 << 20, "tier": "packed"}}
    assert filled(auto, None) is None
    assert filled({"partition": {"tier": "disk"}}, None) == {"partition": {"tier": "disk"}}


def test_a_contestant_is_planned_as_its_options_say():
    config = BenchOffloadConfig(model=MLP, data=DIGITS, optimizer=SGD)
    job = config.job()
    profile = look(job, prepare(job))
    options = filled({"partition": {"memory": LIMIT, "parameters_tier": "disk"}}, 1 << 30) or {}
    plan = planned(config, profile, options["partition"])
    assert (plan.memory, plan.stages[0].parameters_tier, plan.num_stages) == (int(0.7 * (1 << 30)), "disk", 1)
    for contestant in offload_sides.CONTESTANTS.values():
        partition(profile, stages=1, **(filled(contestant, 1 << 30) or {}).get("partition", {}))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"repeats": 0}, "repeats=0 must be 1 or more"),
        ({"warmup": 0}, "warmup=0 must be 1 or more"),
        ({"cases": ["disk", "disk"]}, r"cases=\[disk,disk\] must name one or more, each once"),
        ({"limits": []}, r"limits=\[\] must name one or more"),
        ({"cases": ["tape"]}, "holds tape, which is not known; known are disk, packed, placement"),
        ({"contestants": ["ram"]}, "holds ram, which is not known"),
        ({"networks": ["alexnet"]}, "holds alexnet, which is not known"),
        ({"traces": ["alexnet"]}, "holds alexnet, which is not known"),
        ({"limits": ["half"]}, "limits=half is neither bytes, like 2GiB, nor a share, like 50%"),
        ({"limits": ["0%"]}, "limits=0% is a share of what is needed; write 1% to 100%"),
        ({"limits": ["101%"]}, "limits=101% is a share"),
        ({"speed_bytes": "much"}, "speed_bytes=much is not a size"),
        ({"corpora": "/nowhere"}, r"corpora=/nowhere holds no NAME\.LIMIT\.csv"),
        ({"path": "/nowhere"}, "path=/nowhere is no folder"),
        ({"codec": "zip"}, "zip"),
        ({"deadline": 0.0}, "deadline=0.0 must be above 0"),
        ({"batch_size": 2, "micro_batches": 8}, "too small for micro_batches=8"),
    ],
)
def test_what_does_not_fit_is_refused(options, told):
    with pytest.raises(PenstockError, match=told):
        topics.offload(BenchOffloadConfig(**options))


GROUP = {
    "memory.usage_in_bytes": "1000\n",
    "memory.stat": "cache 300\nrss 600\nmapped_file 50\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
}


def test_a_group_tells_what_cannot_be_given_up_and_who_was_killed(tmp_path):
    for name, text in GROUP.items():
        (tmp_path / name).write_text(text)
    group = memory_group.MemoryGroup(tmp_path)
    assert (group.held_bytes(), group.num_killed) == (750, 3)
    group.limit(123)
    assert (tmp_path / "memory.limit_in_bytes").read_text() == "123"
    group.lift()
    assert (tmp_path / "memory.limit_in_bytes").read_text() == "-1"


def test_a_group_lies_below_that_of_the_process_and_is_gone_with_the_block(tmp_path):
    own, root = tmp_path / "own", tmp_path / "memory"
    own.write_text("5:cpu:/a\n4:memory:/a/b\n0::/\n")
    (root / "a" / "b").mkdir(parents=True)
    assert "there is none at" in (memory_group.why_not(root=root, own=own) or "")
    (root / "memory.limit_in_bytes").write_text("1")
    with memory_group.memory_group(root=root, own=own) as group:
        assert group.path.parent == root / "a" / "b"
    assert not any((root / "a" / "b").iterdir())
    assert memory_group.why_not(root=root, own=own) is None
    own.write_text("4:memory:/elsewhere\n")
    assert "takes none" in (memory_group.why_not(root=root, own=own) or "")
    own.write_text("0::/\n")  # version 2 alone
    assert "there is none at" in (memory_group.why_not(root=root, own=own) or "")


def test_what_is_left_counts_what_did_not_leave():
    seconds = {"kept": [1.0, 2.0, 3.0], "packed": [2.0, 2.0, 2.0]}
    got = {"seconds": seconds, "saved": 80, "kept": 20, "same_bits": True}
    row = offload_packed.row("resnet18", 1, 2, 100, got)
    assert (row["ratio"], row["ratio_of_pairs"]) == (1.0, [0.5, 1.0, 1.5])
    assert offload_packed.left(row) == pytest.approx(0.4)
    assert offload_packed.where(row) == "1 thread, 2 cores"
    assert offload_packed.where(row | {"cores": 1}) == "1 thread, one core alone"
    assert offload_packed.rows([row])[0]["packed"] == "40 B"


BUFFERS = [(0, 2, 10), (1, 3, 20), (2, 4, 10)]


def test_a_placement_is_held_against_overlaps_and_beside_what_lives_at_once():
    assert offload_placement.high(BUFFERS, [0, 10, 0]) == 30
    with pytest.raises(PlanError, match="two buffers in one place"):
        offload_placement.high(BUFFERS, [0, 9, 0])
    row = offload_placement.placed("three", BUFFERS, 30)
    assert (row["num_buffers"], row["max_live"], row["held"], row["gap"]) == (3, 30, 30, 0.0)
    refused = offload_placement.placed("three", BUFFERS, 29)
    assert (refused["held"], refused["gap"]) == (None, None)
    assert "not laid below 29" in offload_placement.sentence(refused)


def test_a_file_of_buffers_is_read_and_a_bad_one_refused(tmp_path):
    good, bad = tmp_path / "A.30.csv", tmp_path / "B.30.csv"
    good.write_text(
        "id,lower,upper,size\n" + "".join(f"{i},{a},{b},{c}\n" for i, (a, b, c) in enumerate(BUFFERS))
    )
    (tmp_path / "notes.csv").write_text("no limit in its name")
    assert offload_sides.files(str(tmp_path)) == [good]
    assert offload_placement.read(good) == BUFFERS
    for text in ("id,lower,upper\n0,1,2\n", "id,lower,upper,size\n0,1,2,x\n"):
        bad.write_text(text)
        with pytest.raises(ConfigError, match=r"B\.30\.csv needs whole numbers"):
            offload_placement.read(bad)


def test_the_picture_has_a_panel_for_each_case():
    sides = taken(disk=[ran(1.0), ran(2.0)], gone=[{"killed": True, "steps": 0}] * 2)
    disk = {"model": "mlp"} | found(sides, given(sides), {})
    seconds = {"kept": [1.0], "packed": [2.0]}
    got = {"seconds": seconds, "saved": 80, "kept": 20, "same_bits": True}
    packed = [offload_packed.row("resnet18", 1, cores, 100, got) for cores in (2, 1)]
    placement = [offload_placement.placed("three", BUFFERS, limit) for limit in (None, 29)]
    results = {"disk": disk, "packed": packed, "placement": placement}
    assert len([axes for axes in figure(results).axes if axes.axison]) == 3
    (axes,) = figure({"disk": disk, "packed": []}).axes
    assert len(axes.get_xticks()) == 3  # who was killed has no bar


@pytest.fixture
def told(tmp_path) -> RunFolder:
    """What a run of a small job is told."""
    config = BenchOffloadConfig(model=MLP, data=DIGITS, optimizer=SGD, batch_size=512, micro_batches=8)
    job = config.job()
    profile = look(job, prepare(job))
    folder = RunFolder(path=tmp_path)
    folder.plans.mkdir()
    for name in ("device", "packed", "disk"):
        options = {"tier": name, "schedule": "gpipe"}  # so much is in flight that some of it surely leaves
        planned(config, profile, options).save(folder.plans / f"{name}.json")
    planned(config, profile, {}).save(folder.plans / "kept.json")
    folder.tell(job, planned(config, profile, {}))
    return folder


def test_runs_train_alike_and_count_what_the_disk_moved(told, tmp_path, monkeypatch):
    everything_leaves(monkeypatch)
    words = {"options": {"memory": {"prefetch_layers": 2}}, "path": str(tmp_path), "warmup": 1, "steps": 2}
    kept, disk = (
        offload_turn.train(told.path, words | {"contestant": name}, None) for name in ("device", "disk")
    )
    assert kept["losses"] == disk["losses"]
    assert len(kept["losses"]) == 3
    assert (kept["bytes_written"], kept["bytes_read"], kept["direct"]) == (0, 0, None)
    assert disk["bytes_written"] > 0
    assert disk["direct"] is not None
    assert min(kept["seconds"], disk["seconds"]) > 0
    assert (tmp_path / "steps").read_text() == "3"


def test_runs_in_turn_train_alike_and_count_what_was_packed(told, tmp_path, monkeypatch):
    everything_leaves(monkeypatch)
    ahead = {"memory": {"prefetch_layers": 0, "writeout_layers": 0}}
    words = {"contestant": "packed", "options": ahead, "path": str(tmp_path)}
    got = offload_turn.train_in_turn(told.path, words | {"warmup": 1, "steps": 1, "repeats": 2}, None)
    assert got["same_bits"]
    assert {side: len(runs) for side, runs in got["seconds"].items()} == {"kept": 2, "packed": 2}
    assert got["saved"] > got["kept"] > 0


def test_the_disk_is_tried_through_its_own_class(tmp_path):
    got = offload_turn.try_disk(tmp_path, {"path": str(tmp_path), "bytes": (16 << 20) + 1}, None)
    assert min(got["written"], got["read"]) > 0
    assert isinstance(got["direct"], bool)


@pytest.mark.slow
def test_a_run_that_fails_or_takes_too_long_ends_the_bench(told):
    words = {"contestant": "nobody", "options": {}, "path": str(told.path), "warmup": 1, "steps": 1}
    with pytest.raises(TransportError, match=r"without a result \(exit code 1\)"):
        run(told.path, "train", words, environment={}, deadline=120)
    with pytest.raises(TransportError, match=r"a run took longer than deadline=0\.01 seconds"):
        run(told.path, "train", words, environment={}, deadline=0.01)


@pytest.mark.slow
@pytest.mark.skipif(memory_group.why_not() is not None, reason="no memory cgroup can be made")
def test_the_system_ends_who_needs_more_than_the_limit(told):
    words = {"contestant": "kept", "options": {}, "path": str(told.path), "warmup": 1, "steps": 1}
    common = {"environment": {}, "deadline": 120}
    assert "seconds" in run(told.path, "train", words, limit=1 << 30, **common)
    assert run(told.path, "train", words, limit=1 << 20, **common)["killed"]


@pytest.mark.slow
def test_a_small_one_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    job = "model=mlp model.hidden=[64,64] data.size=8 data.channels=1 cases=[disk,placement] traces=[gpt]"
    sizes = "repeats=1 steps=1 speed_bytes=8MiB limits=[null,1GiB] contestants=[disk] hydra.run.dir=run"
    assert command.run(["bench", "offload", *job.split(), *sizes.split()]) == 0
    out = capfd.readouterr().out
    assert "the losses of all sides have the same bits" in out
    assert "gpt: " in out
    results = json.loads(Path("run/results.json").read_text())
    limited = results["disk"]["limits_why_not"] is None
    names = [(row["contestant"], row["limit"]) for row in results["disk"]["rows"]]
    kept = [("kept", None), ("kept_as_it_comes", None)]
    assert names == [*kept, ("disk", None), *[("disk", "1GiB")] * limited]
    assert results["disk"]["kept_within"].keys() == ({"1GiB"} if limited else set())
    assert all(row["seconds"] > 0 for row in results["disk"]["rows"])
    assert any(row["peak_bytes"] > 0 for row in results["disk"]["rows"])  # a small one may fit what was there
    assert results["placement"][0]["gap"] <= 0.005
    assert sorted(path.name for path in Path("run").iterdir()) == ["results.json", "results.png"]
