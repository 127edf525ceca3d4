"""Hits of several jobs in one cache of samples and what they save, simulated; and the time of a hit.

``simulated``: hits of jobs that keep their pace next to the optimum, then seconds where jobs wait for
storage. ``hit``: microseconds of a sample in the cache, next to a file in the page cache."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import harness
import numpy as np
from cache_simulator import (
    CLOSED,
    CONTESTANTS,
    Load,
    Outcome,
    Simulation,
    TokenBucket,
    hit_rate,
    optimum,
    simulate,
)
from harness import Options, Results, alternate, medians, say, spread

from penstock.compression.errors import TransportError
from penstock.pipeline.data.cache.client import Client
from penstock.pipeline.data.cache.policies import Lru
from penstock.pipeline.data.cache.policy import Policy
from penstock.pipeline.data.cache.wire import PAGE_BYTES, Hello, pages_of
from penstock.stages.units import parse_bytes

NONE = "none"
OVERBOOKED = 2.0
"""Times what storage gives that jobs would read without a cache if they never waited."""

SAMPLES_OF_HITS, BATCH_OF_HITS = 512, 32


def options() -> Any:
    """Return the parser of the command line."""
    parser = harness.parser(__doc__)
    listed, name_of, count = harness.list_of, harness.name_of, harness.at_least(1)
    size = harness.option(lambda text: parse_bytes(text, name="size"))
    add, parts, names = parser.add_argument, tuple(PARTS), tuple(CONTESTANTS)
    add("--parts", type=listed(name_of(parts)), default=["simulated"], help=f"of {', '.join(parts)}")
    add("--policies", type=listed(name_of(names)), default=list(names), help=f"of {', '.join(names)}")
    add("--jobs", type=listed(count), default=[8], help="jobs that run side by side")
    shares = "capacity relative to all samples that there are"
    add("--shares", type=listed(harness.between(0, 1)), default=[0.05, 0.1, 0.25], help=shares)
    reads = "own: a data set for each job; same: one for all"
    add("--reads", type=listed(name_of(("own", "same"))), default=["own", "same"], help=reads)
    add("--num-samples", type=count, default=1000, help="samples of a data set")
    add("--batch-size", type=count, default=25, help="samples in a batch")
    epochs = "epochs of each job; hits count from the second on"
    add("--epochs", type=harness.at_least(2), default=6, help=epochs)
    add("--sample-bytes", type=size, default=110_000, help="size of a sample, such as 110kB")
    add("--rate", type=size, default=60_000_000, help="bytes a second of the storage where jobs wait for it")
    add("--latency", type=harness.between(-1e-9), default=0.002, help="seconds of a read from it")
    add("--lookahead", type=harness.at_least(0), default=2, help="batches that its readers load ahead")
    add("--seed", type=harness.at_least(0), default=0, help="decides the orders")
    return parser


def bench(asked: Options, path: Path) -> Results:
    """Measure the parts that are asked for, one after another."""
    names = "num_samples batch_size epochs sample_bytes rate latency lookahead seed".split()
    results = Results(path, job={name: getattr(asked, name) for name in names})
    for part in asked.parts:
        PARTS[part](asked, results)
    return results


# Simulated.

CASE_COLUMNS: dict[str, Any] = {
    "policy": "{policy}",
    "data": "{data}",
    "jobs": "{jobs}",
    "capacity": "{share:.0%}",
    "hit rate": "{hit_rate:.3f}",
}
SECONDS_COLUMNS: dict[str, Any] = {
    "makespan": "{makespan:.1f} s",
    "a job, mean": "{seconds:.1f} s",
    "beside none": "{speedup:.2f}x",
    "utilisation": "{utilisation:.2f}",
    "stalled": "{stall_share:.2f}",
}


def simulated_part(asked: Options, results: Results) -> None:
    """Simulate jobs that keep their pace, then jobs that wait for storage."""
    results.keep(simulated=list(paced(asked)), waiting=list(waiting(asked)))
    columns = CASE_COLUMNS | {"closed form": "{closed_form:.3f}", "optimum": "{optimum:.3f}"}
    harness.show(results.content["simulated"], columns | {"of its hits": "{of_optimum:.1%}"}, left=2)
    harness.show(results.content["waiting"], CASE_COLUMNS | SECONDS_COLUMNS, left=2)


def _cases(asked: Options) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield data, jobs and share, and the slots of the cache."""
    for data, jobs, share in product(asked.reads, asked.jobs, asked.shares):
        sets = jobs if data == "own" else 1
        yield {"data": data, "jobs": jobs, "share": share}, round(share * sets * asked.num_samples)


def loads(asked: Options, data: str, batches: Sequence[float], *, trains: bool) -> list[Load]:
    """Return jobs that take so many seconds for a batch, to train it, or else to take its samples one by one.

    They begin one after another within an epoch of the first; one that is so many times as fast as the mean
    has as many times the epochs."""
    mean = sum(batches) / len(batches)
    epoch = batches[0] * asked.num_samples / asked.batch_size
    return [
        Load(
            name=f"job{number}",
            data=None if data == "own" else "shared",
            num_samples=asked.num_samples,
            batch_size=asked.batch_size,
            epochs=max(2, round(asked.epochs * mean / seconds)),
            training=seconds if trains else 0.0,
            sample_bytes=asked.sample_bytes,
            # Not all at once: samples that are being read are in no cache, and would make it a little larger.
            start=(epoch + batches[0] / asked.batch_size) * number / len(batches),
            seed=1000 * asked.seed + number,
        )
        for number, seconds in enumerate(batches)
    ]


def paced(asked: Options) -> Iterator[dict[str, Any]]:
    """Yield a row for each policy where every job takes a batch a second, whatever it hits."""
    for case, slots in _cases(asked):
        jobs = loads(asked, case["data"], [1.0] * case["jobs"], trains=False)
        for name in asked.policies:
            # Reading takes next to nothing, but something, and nothing hides it: every sample is wanted.
            run = simulate(
                jobs,
                CONTESTANTS[name](slots * asked.sample_bytes),
                storage=TokenBucket(latency=1e-9),
                sample_seconds=1 / asked.batch_size,
            )
            form, hits = CLOSED.get((name, case["data"])), optimum(run.trace, slots)
            row = {"policy": name, **case, "hit_rate": hit_rate(run.jobs.values())}
            row |= {"closed_form": form and form(case["share"])}
            row |= {"optimum": float(hits[np.array(run.epochs) > 0].mean())}
            yield row | {"of_optimum": run.hits / max(1, int(hits.sum()))}


def paces(asked: Options, jobs: int) -> list[float]:
    """Seconds of a batch of each job where storage is too slow for all, 0.5 to 2 times the usual there."""
    batch = jobs * asked.batch_size * asked.sample_bytes / asked.rate / OVERBOOKED
    return [batch * 2 ** (2 * number / max(1, jobs - 1) - 1) for number in range(jobs)]


def waiting(asked: Options) -> Iterator[dict[str, Any]]:
    """Yield a row for each policy where storage is too slow for the jobs, the slowest a quarter as fast."""
    for case, slots in _cases(asked):
        jobs = loads(asked, case["data"], paces(asked, case["jobs"]), trains=True)
        without: Mapping[str, Outcome] = {}
        for name in (NONE, *asked.policies):
            run = _simulate(asked, jobs, name, slots)
            without = without or run.jobs
            yield {"policy": name, **case} | job_facts(run.jobs, without)


def _bucket(asked: Options) -> TokenBucket:
    return TokenBucket(asked.rate, latency=asked.latency, burst=asked.rate * asked.latency)


def _simulate(asked: Options, jobs: Sequence[Load], name: str, slots: int) -> Simulation:
    policy: Policy = Lru(0) if name == NONE else CONTESTANTS[name](slots * asked.sample_bytes)
    return simulate(jobs, policy, storage=_bucket(asked), lookahead=asked.lookahead)


def job_facts(jobs: Mapping[str, Outcome], without: Mapping[str, Outcome]) -> dict[str, Any]:
    """Hits, seconds and utilisation of jobs, and their speed relative to the same without a cache."""
    outcomes = list(jobs.values())
    total, before = (sum(one.seconds for one in side.values()) for side in (jobs, without))
    return {
        "hit_rate": hit_rate(outcomes),
        "loads": sum(one.loads for one in outcomes),
        "makespan": max(one.end for one in outcomes) - min(one.begin for one in outcomes),
        "seconds": total / len(outcomes),
        "speedup": before / total,
        "utilisation": statistics.mean(one.computing / one.seconds for one in outcomes),
        "stall_share": statistics.mean(one.stalled / one.seconds for one in outcomes),
    }


# A hit.


def noise(number: int, num_bytes: int) -> bytes:
    """Return the bytes of a file, always the same."""
    return np.random.Generator(np.random.SFC64(number)).bytes(num_bytes)


@contextlib.contextmanager
def broker(policy: str, slots: int, num_bytes: int) -> Iterator[Path]:
    """Serve a cache for so many samples in a process; yield its socket."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as home:
        socket, capacity = Path(home, "cache.sock"), slots * pages_of(num_bytes, PAGE_BYTES) * PAGE_BYTES
        command = [sys.executable, "-m", "penstock", "cache", "serve"]
        command += [f"socket={socket}", f"policy={policy}", f"capacity={capacity}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                if not process.stdout.readline():
                    raise TransportError("the cache did not begin; see its output above")
                yield socket
            finally:
                process.terminate()


def hit_part(asked: Options, results: Results) -> None:
    """Let epochs of hits and of file reads take turns; measure microseconds of a sample."""
    number, size = SAMPLES_OF_HITS, asked.sample_bytes
    batches = [list(range(at, at + BATCH_OF_HITS)) for at in range(0, number, BATCH_OF_HITS)]
    counts: Any = {"num_samples": number, "batch_size": BATCH_OF_HITS, "epochs": 1 << 20}
    hello = Hello(job="hits", run="1", data="made up", **counts)
    with broker("next_use", number, size) as socket:
        client, epochs = Client(socket, hello, tell=_refuse), itertools.count()
        paths = [socket.parent / f"{index:06}" for index in range(number)]
        for index, path in enumerate(paths):
            path.write_bytes(noise(index, size))

        def run(read: Callable[[list[int]], object]) -> float:
            client.begin(next(epochs), range(number), range(number))
            start = time.perf_counter()
            for batch in batches:
                read(batch)
            return (time.perf_counter() - start) / number * 1e6

        def store(batch: list[int]) -> None:
            client.use(batch)
            client.store(batch, [paths[index].read_bytes() for index in batch])

        def hit(batch: list[int]) -> None:
            if None in client.use(batch):
                raise TransportError("the cache lacks samples that were stored in it")

        def read_files(batch: list[int]) -> None:
            for index in batch:
                paths[index].read_bytes()

        run(store)
        sides = {"hit": partial(run, hit), "file in the page cache": partial(run, read_files)}
        alternate(sides, 1)
        taken = alternate(sides, 20 * asked.repeats)
        client.close()
    facts = {"batch": BATCH_OF_HITS, "sample_bytes": size, "microseconds": medians(taken), "runs": taken}
    results.keep(hit=facts)
    for side, microseconds in facts["microseconds"].items():
        say(f"{side}: {microseconds:.1f} us a sample of {size} bytes ({spread(taken[side])})")


def _refuse(sentence: str) -> None:
    raise TransportError(sentence)


PARTS: dict[str, Callable[[Options, Results], None]] = {
    "simulated": simulated_part,
    "hit": hit_part,
}


if __name__ == "__main__":
    harness.main(options(), bench)
