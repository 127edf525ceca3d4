"""penstock bench cache: what is simulated, what stands beside it, and how it is shown."""

from __future__ import annotations

import json

import pytest

from penstock.compression.errors import PenstockError
from penstock.conf.bench_cache import BenchCacheConfig
from penstock.pipeline.samples.cache import closed_forms
from penstock.scripts import command
from penstock.scripts.bench import cache_bench, cache_sides, cache_simulated, topics
from penstock.scripts.bench.cache_simulated import loads, paced, paced_rows, waiting, waiting_rows

pytestmark = pytest.mark.slow  # what it tests is a tool of maintainers

TINY = {"num_samples": 80, "batch_size": 8, "epochs": 3, "jobs": [3], "shares": [0.2]}


def test_the_table_of_hit_rates_has_all_policies_beside_the_optimum():
    rows = list(paced(BenchCacheConfig(**TINY)))
    found = {(row["policy"], row["data"], row["error"]): row for row in rows}
    timed = len(cache_sides.TIMED)
    assert len(found) == len(rows) == 2 * (len(BenchCacheConfig().policies) + timed)
    assert all(row["of_optimum"] <= 1.0 for row in rows)
    assert min(row["of_optimum"] for row in rows if row["policy"] == "next_use") > 0.95
    assert all(row["optimum"] > row["hit_rate"] - 0.01 for row in rows)  # both from the second epoch on
    kept = found["never_evict", "own", 0.0]
    assert kept["hit_rate"] == kept["closed_form"] == closed_forms.never_evict(0.2)
    assert found["never_evict", "same", 0.0]["hit_rate"] == 0.2
    assert found["lru", "same", 0.0]["closed_form"] is None
    assert found["next_use_told", "own", 0.1]["hit_rate"] > kept["hit_rate"]
    assert paced_rows(rows)[0] == {
        "policy": "lru",
        "data": "own",
        "jobs": "3",
        "capacity": "20%",
        "hit rate": f"{rows[0]['hit_rate']:.3f}",
        "closed form": "0.021",
        "optimum": f"{rows[0]['optimum']:.3f}",
        "of its hits": f"{rows[0]['of_optimum']:.1%}",
    }
    assert "next_use, times off by 10%" in {row["policy"] for row in paced_rows(rows)}


def test_the_table_of_seconds_begins_with_no_cache():
    rows = list(waiting(BenchCacheConfig(**TINY, policies=["never_evict", "next_use"], reads=["own"])))
    none, kept, ours = rows
    assert (none["policy"], none["hit_rate"], none["speedup"]) == ("none", 0.0, 1.0)
    assert none["loads"] == 80 * (7 + 4 + 2)  # the fastest goes through more epochs
    assert none["utilisation"] + none["stall_share"] == pytest.approx(1.0)
    assert none["seconds"] > kept["seconds"] > 0
    assert ours["hit_rate"] > 0.2
    assert ours["speedup"] == none["seconds"] / ours["seconds"] > 1
    assert waiting_rows(rows)[0]["beside none"] == "1.00x"


def test_jobs_begin_within_an_epoch_and_are_off_either_way():
    config = BenchCacheConfig(**TINY)
    jobs = loads(config, "same", [2.0, 2.0, 2.0, 2.0], trains=False, error=0.25)
    assert [job.start for job in jobs] == [0.0, 5.0625, 10.125, 15.1875]
    assert {job.error for job in jobs} == {0.75, 1.25}
    assert {(job.reads, job.training) for job in jobs} == {("shared", 0.0)}


def test_the_picture_has_the_optimum_beside_the_policies_and_who_has_no_rows_no_panel():
    config = BenchCacheConfig(**TINY, policies=["lru", "next_use", "next_use_told"])
    results = {"simulated": list(paced(config)), "waiting": list(waiting(config))}
    panels = cache_bench.figure(results).axes
    assert len(panels) == 4
    names = [axes.get_legend_handles_labels()[1] for axes in panels]
    assert names == [["lru", "next_use", "offline optimum\n(Belady)"]] * 2 + [["lru", "next_use"]] * 2
    heights = [bar.get_height() for bar in panels[0].patches]  # pyright: ignore[reportAttributeAccessIssue]
    own = [row for row in results["simulated"] if row["data"] == "own"]
    assert heights == [own[0]["hit_rate"], own[1]["hit_rate"], own[0]["optimum"]]
    assert len(cache_bench.figure({"simulated": results["simulated"]}).axes) == 2


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"parts": ["imagined"]}, "parts=.imagined. holds imagined, which is not known; known are simulated"),
        ({"policies": ["belady"]}, "holds belady, which is not known"),
        ({"reads": ["others"]}, "holds others, which is not known; known are own, same"),
        ({"sample_bytes": "big"}, "sample_bytes=big is not a size"),
        ({"rate": 0}, "rate=0 is not a size"),
        ({"jobs": []}, "must name one or more, each once"),
        ({"jobs": [0]}, "jobs=0 must be 1 or more"),
        ({"shares": [0.0]}, "must be above 0 and up to 1"),
        ({"shares": [1.5]}, "must be above 0 and up to 1"),
        ({"epochs": 1}, "epochs=1 must be 2 or more"),
        ({"lookahead": -1}, "lookahead=-1 must be 0 or more"),
        ({"error": 1.0}, "error=1.0 must be"),
        ({"latency": -1.0}, "latency=-1.0"),
    ],
)
def test_what_does_not_fit_is_refused(options, told):
    with pytest.raises(PenstockError, match=told):
        topics.cache(BenchCacheConfig(**options))


def test_parts_and_policies_are_those_that_there_are():
    assert tuple(cache_bench.PARTS) == cache_sides.PARTS
    assert set(BenchCacheConfig().policies) <= set(cache_sides.CONTESTANTS)
    assert set(cache_sides.TIMED) <= set(cache_sides.CONTESTANTS)
    assert {name for name, _ in cache_simulated.CLOSED} <= set(cache_sides.CONTESTANTS)


def test_a_small_bench_leaves_its_results_and_a_picture(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    typed = "num_samples=60 batch_size=6 epochs=2 jobs=[2] shares=[0.25] policies=[gain,next_use]"
    assert command.run(["bench", "cache", *typed.split(), "hydra.run.dir=run"]) == 0
    out, error = capfd.readouterr()
    assert error == ""
    assert "of its hits" in out
    assert "utilisation" in out
    found = json.loads((tmp_path / "run" / "results.json").read_text())
    assert found["command"].startswith("penstock bench cache num_samples=60")
    assert (len(found["simulated"]), len(found["waiting"])) == (6, 6)
    assert found["job"]["epochs"] == 2
    assert (tmp_path / "run" / "results.png").stat().st_size > 10_000
