"""penstock bench cache, its half in earnest: processes, a broker and a slow store, beside the simulator."""

from __future__ import annotations

import json

import pytest

from penstock.compression.errors import TransportError
from penstock.conf.bench_cache import BenchCacheConfig
from penstock.pipeline.samples.drawn import order_of
from penstock.scripts import command
from penstock.scripts.bench import cache_bench, cache_hit, cache_jobs, cache_loaders, cache_real
from penstock.scripts.bench.cache_job import Job, Watched
from penstock.scripts.bench.cache_simulated import paces
from penstock.scripts.bench.slow_store import MadeUp

pytestmark = pytest.mark.slow  # what it tests is a tool of maintainers

TINY = {"num_samples": 60, "batch_size": 5, "epochs": 4, "rate": "6MB", "sample_bytes": "20kB"}


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["own", "same"])
def test_processes_hit_as_often_as_the_simulator_says(reads):
    config = BenchCacheConfig(**TINY, policies=["never_evict", "next_use", "next_use_told"])
    none, kernel, kept, ours = list(cache_real.rows(config, reads, 2, 0.3))
    named = [row["policy"] for row in (none, kernel, kept, ours)]
    assert named == ["none", "page cache", "never_evict", "next_use"]  # a broker has no next_use_told
    assert all(row["same_samples"] for row in (none, kernel, kept, ours))
    assert none["hit_rate"] == none["simulated"]["hit_rate"] == 0.0
    assert none["loads"] == none["simulated"]["loads"] == 60 * (10 + 2)
    assert "simulated" not in kernel
    assert kernel["hit_rate"] > 0.5  # the files have just been written
    for row in (kept, ours):
        assert row["hit_rate"] == pytest.approx(row["simulated"]["hit_rate"], abs=0.12)
        assert row["hit_rate"] > 0.2
        assert 0 < row["utilisation"] <= 1
        assert row["loads"] < none["loads"]
    words = cache_real.shown([ours])[0]
    assert (words["policy"], words["capacity"], words["samples"]) == ("next_use", "30%", "the same")
    assert cache_real.sentence(none).startswith(
        f"policy none, data {reads}, jobs 2, capacity 30%, hit rate 0.0"
    )


def test_the_simulator_is_given_the_orders_of_the_real_jobs():
    config = BenchCacheConfig(**TINY)
    listed = cache_real._jobs(config, "own", 3)
    assert [cache_real.seed_of(load) for load in listed] == [0, 1, 2]
    assert listed[2].order(1, 99) == order_of(60, seed=2, epoch=1).tolist()
    assert listed[2].order(listed[2].epochs, 99) is None
    assert [load.training for load in listed] == paces(config, 3)
    assert paces(config, 3)[2] == pytest.approx(4 * paces(config, 3)[0])


def test_a_sample_tells_whether_it_was_read():
    files = MadeUp(num_samples=3, num_bytes=1000)
    data = Watched(files)
    checksum, seconds = data[1]
    assert seconds > 0
    assert data.decode(1, files.read(1)) == (checksum, -1.0)
    assert data.decode(2, files.read(2))[0] != checksum


def test_a_job_that_fails_is_named(tmp_path):
    (load,) = cache_real._jobs(BenchCacheConfig(**TINY), "same", 1)
    lost = Job(load=load, seed=0, first=0, lookahead=2, store=tmp_path / "none", folder=None, socket=None)
    with pytest.raises(TransportError, match="job0 was lost"):
        cache_real.side_by_side([lost])


@pytest.mark.slow
def test_training_jobs_that_share_a_cache_have_the_losses_and_weights_of_those_without():
    config = BenchCacheConfig(**TINY)
    taken = {
        side: [cache_jobs.turn(config, 0.25, shared=side == cache_jobs.WITH)]
        for side in (cache_jobs.WITHOUT, cache_jobs.WITH)
    }
    row = cache_jobs.row(0.25, taken)
    assert row["same_losses"]
    assert row["same_weights"]
    assert row["steps"] == [48, 48]
    assert len({*row["weights"]}) == 2  # seeds of their own
    assert row["hit_rate"] > 0.1
    one = taken[cache_jobs.WITH][0]["losses"][0]
    assert one[-1] < one[0]
    assert cache_jobs.sentence(row).endswith("losses and weights are the same")
    taken[cache_jobs.WITH][0]["losses"][1][-1] += 1e-7
    assert not cache_jobs.row(0.25, taken)["same_losses"]


@pytest.mark.slow
def test_hits_and_loaders_are_measured_and_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cache_loaders, "BATCHES", 2)
    monkeypatch.setattr(cache_loaders, "BATCH", 2)
    assert command.run(["bench", "cache", "parts=[hit,loaders]", "repeats=1", "hydra.run.dir=out"]) == 0
    said = capsys.readouterr().out
    assert "hit: " in said
    assert "workers=2: " in said
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert set(found["hit"]["microseconds"]) == {cache_hit.HIT, cache_hit.FILE}
    assert min(found["hit"]["microseconds"].values()) > 0
    sides = [row["side"] for row in found["loaders"]["rows"]]
    assert sides == ["in memory", "workers=0", "workers=1", "workers=2"]
    assert (tmp_path / "out" / "results.png").exists()


def test_noise_packs_to_files_of_a_photograph(tmp_path):
    sizes = cache_loaders.write(tmp_path, 7, seed=0)
    assert all(60_000 < size < 140_000 for size in sizes)
    assert len(list((tmp_path / "train").rglob("*.jpg"))) == 7


def test_the_picture_has_a_panel_for_each_part_that_was_measured():
    row = {"data": "own", "jobs": 2, "share": 0.25, "hit_rate": 0.4, "speedup": 1.2}
    real = [row | {"policy": "page cache"}] + [
        row | {"policy": name, "simulated": {"hit_rate": 0.41}} for name in ("none", "lru", "next_use")
    ]
    rows = [{"side": "in memory", "samples_per_second": 3.0, "samples_per_second_of_runs": [2.0, 4.0]}]
    jobs = [{"share": 0.25, "without": {"makespan": [3.0, 5.0]}, "with": {"makespan": [2.0, 3.0]}}]
    hit = {"sample_bytes": 1, "microseconds": {"hit": 2.0}, "runs": {"hit": [1.0, 3.0]}}
    figure = cache_bench.figure({"real": real, "hit": hit, "loaders": {"rows": rows}, "jobs": jobs})
    assert len(figure.axes) == 5
    heights = [bar.get_height() for bar in figure.axes[0].patches]  # pyright: ignore[reportAttributeAccessIssue]
    assert heights == [0.4, 0.4, 0.41, 0.41]
    assert [bar.get_height() for bar in figure.axes[4].patches] == [4.0, 2.5]  # pyright: ignore[reportAttributeAccessIssue]
