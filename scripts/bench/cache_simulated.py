"""The part ``simulated`` of ``penstock bench cache``: hits of jobs that keep their pace, beside the optimum.

Then the same policies where jobs wait for storage: hits are worth what they save of waiting."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from ...conf.bench_cache import BenchCacheConfig
from ...pipeline.samples.cache import closed_forms
from ...pipeline.samples.cache.belady import optimum
from ...pipeline.samples.cache.loads import Load
from ...pipeline.samples.cache.policy import Policy
from ...pipeline.samples.cache.simple import NeverEvict
from ...pipeline.samples.cache.simulator import Simulated, simulate
from ...pipeline.samples.cache.storage import TokenBucket
from ...stages.units import parse_bytes
from .cache_sides import CONTESTANTS, TIMED
from .harness import Record, table

CLOSED: dict[tuple[str, str], Callable[[float], float]] = {
    ("never_evict", "own"): closed_forms.never_evict,
    ("never_evict", "same"): closed_forms.never_evict,
    ("static_split", "own"): closed_forms.never_evict,
    ("lru", "own"): closed_forms.lru,
} | {
    (name, data): form
    for name in (*TIMED, "next_use_uncapped")
    for data, form in (("own", closed_forms.next_use_own), ("same", closed_forms.next_use_same))
}
"""The hit rates that are known in closed form, by policy and data."""

NONE = "none"
OVERBOOKED = 2.0
"""Where jobs wait: never waiting, they would read so many times what storage gives, without a cache."""

Row = dict[str, Any]


def bench(config: BenchCacheConfig, record: Record) -> None:
    """Simulate all that is asked for, and print both tables."""
    record.keep(simulated=[], waiting=[])
    for row in paced(config):
        record.keep(simulated=[row])
    record.screen.print(table(paced_rows(record.content["simulated"]), left=["policy", "data"]))
    for row in waiting(config):
        record.keep(waiting=[row])
    record.screen.print(table(waiting_rows(record.content["waiting"]), left=["policy", "data"]))


def _cases(config: BenchCacheConfig) -> Iterator[tuple[str, int, float, int]]:
    """Data, jobs, share and slots."""
    for data, jobs, share in product(config.reads, config.jobs, config.shares):
        sets = jobs if data == "own" else 1
        yield data, jobs, share, round(share * sets * config.num_samples)


def loads(
    config: BenchCacheConfig, data: str, batches: Sequence[float], *, trains: bool, error: float = 0.0
) -> list[Load]:
    """Jobs that take so many seconds for a batch, to train it, or else to take its samples one by one.

    They begin one after another within the time of an epoch of the first; one that is so many times as fast
    as the mean has as many times the epochs. Each is off by all of ``error``, either way."""
    drawn, mean = random.Random(config.seed), sum(batches) / len(batches)
    epoch = batches[0] * config.num_samples / config.batch_size
    return [
        Load(
            name=f"job{number}",
            data=None if data == "own" else "shared",
            num_samples=config.num_samples,
            batch_size=config.batch_size,
            epochs=max(2, round(config.epochs * mean / seconds)),
            training=seconds if trains else 0.0,
            sample_bytes=parse_bytes(config.sample_bytes, name="sample_bytes"),
            # Not all at one moment: what is being read lies in no cache, and would make it a little larger.
            start=(epoch + batches[0] / config.batch_size) * number / len(batches),
            error=1 + drawn.choice((-error, error)),
        )
        for number, seconds in enumerate(batches)
    ]


def paced(config: BenchCacheConfig) -> Iterator[Row]:
    """A row for each policy where every job takes a batch a second, whatever it hits."""
    num_bytes = parse_bytes(config.sample_bytes, name="sample_bytes")
    for data, jobs, share, slots in _cases(config):
        for name in config.policies:
            for error in dict.fromkeys((0.0, config.error if name in TIMED else 0.0)):
                # Reading takes next to nothing, but something, and nothing hides it: every sample is wanted.
                found = simulate(
                    loads(config, data, [1.0] * jobs, trains=False, error=error),
                    CONTESTANTS[name](slots * num_bytes),
                    storage=TokenBucket(latency=1e-9),
                    sample_seconds=1 / config.batch_size,
                    seed=config.seed,
                )
                form = CLOSED.get((name, data))
                yield {
                    "policy": name,
                    "data": data,
                    "jobs": jobs,
                    "share": share,
                    "error": error,
                    "hit_rate": found.hit_rate(),
                    "closed_form": form and form(share),
                } | beside(found, slots)


def beside(found: Simulated, slots: int) -> Row:
    """The optimum of a run: its hit rate from the second epoch on, and our hits of all epochs by its own."""
    hits = optimum(found.trace, slots)
    later = [hit for hit, epoch in zip(hits.tolist(), found.epochs, strict=True) if epoch]
    return {"optimum": sum(later) / len(later), "of_optimum": found.hits / max(1, int(hits.sum()))}


def paces(config: BenchCacheConfig, jobs: int) -> list[float]:
    """Seconds of a batch of each job where storage is too slow for all, 0.5 to 2 of what is usual there."""
    num_bytes = parse_bytes(config.sample_bytes, name="sample_bytes")
    batch = jobs * config.batch_size * num_bytes / parse_bytes(config.rate, name="rate") / OVERBOOKED
    return [batch * 2 ** (2 * number / max(1, jobs - 1) - 1) for number in range(jobs)]


def waiting(config: BenchCacheConfig) -> Iterator[Row]:
    """A row for each policy where storage is too slow for the jobs, the slowest a quarter as fast."""
    num_bytes = parse_bytes(config.sample_bytes, name="sample_bytes")
    rate = parse_bytes(config.rate, name="rate")
    for data, jobs, share, slots in _cases(config):
        training = paces(config, jobs)
        sides: dict[str, Callable[[int], Policy]] = {NONE: lambda _: NeverEvict(0)}
        sides |= {name: CONTESTANTS[name] for name in config.policies}
        without = None
        for name, make in sides.items():
            found = simulate(
                loads(config, data, training, trains=True),
                make(slots * num_bytes),
                storage=TokenBucket(rate, latency=config.latency, burst=rate * config.latency),
                lookahead=config.lookahead,
                warm_up=True,
                seed=config.seed,
            )
            done = list(found.jobs.values())
            seconds = sum(job.seconds for job in done) / jobs
            without = seconds if without is None else without
            yield {
                "policy": name,
                "data": data,
                "jobs": jobs,
                "share": share,
                "hit_rate": found.hit_rate(),
                "loads": sum(job.loads for job in done),
                "makespan": found.makespan,
                "seconds": seconds,
                "speedup": without / seconds,
                "utilisation": sum(job.utilisation for job in done) / jobs,
                "stall_share": sum(job.stall_share for job in done) / jobs,
            }


def paced_rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The rows of the table of hit rates."""
    return [_case(row, row["error"]) | _hits(row) for row in found]


def _hits(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "hit rate": f"{row['hit_rate']:.3f}",
        "closed form": "" if row["closed_form"] is None else f"{row['closed_form']:.3f}",
        "optimum": f"{row['optimum']:.3f}",
        "of its hits": f"{row['of_optimum']:.1%}",
    }


def waiting_rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The rows of the table of seconds."""
    return [
        _case(row, 0.0)
        | {
            "hit rate": f"{row['hit_rate']:.3f}",
            "makespan": f"{row['makespan']:.0f} s",
            "a job, mean": f"{row['seconds']:.0f} s",
            "beside none": f"{row['speedup']:.2f}x",
            "utilisation": f"{row['utilisation']:.2f}",
            "stalled": f"{row['stall_share']:.2f}",
        }
        for row in found
    ]


def _case(row: Mapping[str, Any], error: float) -> dict[str, str]:
    off = f", times off by {error:.0%}" if error else ""
    return {
        "policy": f"{row['policy']}{off}",
        "data": row["data"],
        "jobs": str(row["jobs"]),
        "capacity": f"{row['share']:.0%}",
    }
