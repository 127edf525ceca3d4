"""Hits of several jobs in one cache of samples, simulated, next to the optimum; and the time of a hit.

The simulator drives a policy as the broker does; a job keeps its pace, whatever it hits. The same seeds give
the same result. Source of the optimum: L. A. Belady, A study of replacement algorithms for a virtual-storage
computer, IBM Systems Journal 1966."""

import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush, merge
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import Options, Results, alternate, medians, spread

from penstock.compression.errors import TransportError
from penstock.pipeline.data.cache.client import Client
from penstock.pipeline.data.cache.policies import POLICIES, policy
from penstock.pipeline.data.cache.policy import Job, Policy, Times
from penstock.pipeline.data.cache.wire import PAGE_BYTES, Hello, pages_of
from penstock.pipeline.data.random_draws import order_of
from penstock.stages.units import parse_bytes

SAMPLES_OF_HITS, BATCH_OF_HITS = 512, 32


def options() -> Any:
    """Return the parser of the command line."""
    parser = harness.parser(__doc__)
    listed, count, add = harness.list_of, harness.at_least(1), parser.add_argument
    add("--parts", type=listed(known=PARTS), default=["simulated"], help=f"of {', '.join(PARTS)}")
    add("--policies", type=listed(known=POLICIES), default=list(POLICIES), help=f"of {', '.join(POLICIES)}")
    add("--jobs", type=listed(count), default=[8], help="jobs that run side by side")
    shares = "capacity relative to all samples that there are"
    add("--shares", type=listed(harness.at_least(0.0)), default=[0.05, 0.1, 0.25], help=shares)
    reads = "own: a data set for each job; same: one for all"
    add("--reads", type=listed(known=("own", "same")), default=["own", "same"], help=reads)
    add("--num-samples", type=count, default=1000, help="samples of a data set")
    add("--batch-size", type=count, default=25, help="samples in a batch")
    epochs = "epochs of each job; hits count from the second on"
    add("--epochs", type=harness.at_least(2), default=6, help=epochs)
    size = partial(parse_bytes, name="size")
    add("--sample-bytes", type=size, default=110_000, help="size of a sample that is hit, such as 110kB")
    return parser


def bench(asked: Options, path: Path) -> Results:
    """Measure the parts that are asked for, one after another."""
    names = "num_samples batch_size epochs sample_bytes".split()
    results = Results(path, simulated=[], job={name: getattr(asked, name) for name in names})
    for part in asked.parts:
        PARTS[part](asked, results)
    return results


def simulated(asked: Options, results: Results) -> None:
    """Simulate jobs that take a sample a second each, and begin evenly within an epoch."""
    for data, jobs, share in itertools.product(asked.reads, asked.jobs, asked.shares):
        slots = round(share * (jobs if data == "own" else 1) * asked.num_samples)
        same = {name: getattr(asked, name) for name in ("num_samples", "batch_size", "epochs")}
        loads = []
        for number in range(jobs):
            place = {"data": number if data == "own" else 0, "start": (asked.num_samples + 1) * number / jobs}
            loads.append(Load(name=f"job{number}", seed=number, **place, **same))
        for name in asked.policies:
            trace = simulate(loads, policy(name, slots))
            best = optimum(trace.keys, slots)
            row = {"policy": name, "data": data, "jobs": jobs, "share": share, "hit_rate": trace.hit_rate()}
            row |= {"optimum": trace.hit_rate(best), "of_optimum": sum(trace.hits) / max(1, int(best.sum()))}
            results.keep(simulated=[row])
    columns = {"policy": "{policy}", "data": "{data}", "jobs": "{jobs}", "capacity": "{share:.0%}"}
    columns |= {"hit rate": "{hit_rate:.3f}", "optimum": "{optimum:.3f}", "of its hits": "{of_optimum:.1%}"}
    harness.show(results.content["simulated"], columns, left=2)


def hit(asked: Options, results: Results) -> None:
    """Let epochs of hits and of file reads take turns; measure microseconds of a sample."""
    number, size = SAMPLES_OF_HITS, asked.sample_bytes
    batches = [list(range(at, at + BATCH_OF_HITS)) for at in range(0, number, BATCH_OF_HITS)]
    facts = {"num_samples": number, "batch_size": BATCH_OF_HITS, "epochs": 1 << 20}
    hello = Hello(job="hits", run="1", data="noise", **facts)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as home:
        socket, capacity = Path(home, "cache.sock"), number * pages_of(size, PAGE_BYTES) * PAGE_BYTES
        paths = [Path(home, f"{index:06}") for index in range(number)]
        for index, path in enumerate(paths):
            path.write_bytes(np.random.Generator(np.random.SFC64(index)).bytes(size))
        command = [sys.executable, "-m", "penstock", "cache", "serve", f"socket={socket}"]
        with subprocess.Popen(
            [*command, f"capacity={capacity}"], stdout=subprocess.PIPE, text=True
        ) as broker:
            try:
                if not (broker.stdout and broker.stdout.readline()):
                    raise TransportError("the cache did not begin; see its output above")
                taken = _turns(Client(socket, hello, tell=_refuse), paths, batches, asked.repeats)
            finally:
                broker.terminate()
    facts = {"batch": BATCH_OF_HITS, "sample_bytes": size, "microseconds": medians(taken), "runs": taken}
    results.keep(hit=facts)
    for side, microseconds in facts["microseconds"].items():
        print(f"{side}: {microseconds:.1f} us a sample of {size} bytes ({spread(taken[side])})", flush=True)


def _turns(
    client: Client, paths: list[Path], batches: list[list[int]], repeats: int
) -> dict[str, list[float]]:
    epochs: Iterator[int] = itertools.count()
    everything = range(len(paths))

    def run(read: Callable[[list[int]], object]) -> float:
        client.begin(next(epochs), everything, everything)
        start = time.perf_counter()
        for batch in batches:
            read(batch)
        return (time.perf_counter() - start) / len(paths) * 1e6

    def store(batch: list[int]) -> None:
        client.use(batch)
        client.store(batch, [paths[index].read_bytes() for index in batch])

    def use(batch: list[int]) -> None:
        if None in client.use(batch):
            raise TransportError("the cache lacks samples that were stored in it")

    def read_files(batch: list[int]) -> None:
        for index in batch:
            paths[index].read_bytes()

    run(store)
    sides = {"hit": partial(run, use), "file in the page cache": partial(run, read_files)}
    alternate(sides, 1)
    taken = alternate(sides, 20 * repeats)
    client.close()
    return taken


def _refuse(sentence: str) -> None:
    raise TransportError(sentence)


PARTS: dict[str, Callable[[Options, Results], None]] = {"simulated": simulated, "hit": hit}


# Jobs at one cache, simulated use by use, and the offline optimum of their hits.


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One job; ``data``: number of its data set; ``start``: second of its first use; each takes a second."""

    name: str
    data: int
    num_samples: int
    batch_size: int
    epochs: int
    start: float = 0.0
    seed: int = 0

    def order(self, epoch: int) -> list[int]:
        """Return the samples of an epoch, in the order of ``penstock.cached``."""
        return order_of(self.num_samples, seed=self.seed, epoch=epoch).tolist()

    def uses(self) -> Iterator[tuple[float, str, int, int]]:
        """Yield time, name, epoch and place of each use."""
        for number in range(self.epochs * self.num_samples):
            yield (self.start + number, self.name, *divmod(number, self.num_samples))


@dataclass(slots=True)
class Trace:
    """Uses of all jobs in the order of time: sample (numbered over all data sets), epoch, and if it hit."""

    keys: list[int] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    hits: list[bool] = field(default_factory=list)

    def hit_rate(self, hits: Sequence[bool] | np.ndarray | None = None) -> float:
        """Hits by uses from the second epoch on: nothing is there to be hit in the first."""
        later = np.asarray(self.epochs) > 0
        return float(np.asarray(self.hits if hits is None else hits)[later].mean())


def simulate(loads: Sequence[Load], policy: Policy) -> Trace:
    """Run jobs side by side until all have ended; a sample has one byte."""
    trace, jobs, orders = Trace(), {load.name: load for load in loads}, dict[str, list[int]]()
    most = max(load.num_samples for load in loads)
    for now, name, epoch, place in merge(*(load.uses() for load in loads)):
        load = jobs[name]
        if place == 0 and epoch <= 1:
            size, batch, times = load.num_samples, load.batch_size, None
            if epoch:  # its first epoch was measured: reading is not hidden, so every sample is wanted
                io = {"batch_io": float(batch), "sample_io": 1.0, "hidden": 0.0}
                times = Times(epoch=float(size), augmentation=0.0, training=0.0, **io)
            job = Job(name=name, data=f"data {load.data}", num_samples=size, batch_size=batch, times=times)
            policy.join(job, now)
        if place == 0:
            following = load.order(epoch + 1) if epoch + 1 < load.epochs else None
            orders[name] = load.order(epoch)
            policy.begin(name, orders[name], following, now)
        index = orders[name][place]
        hit = policy.use(name, index, now).entry is not None
        if not hit:
            policy.offer(name, index, 1, now)
        trace.keys.append(most * load.data + index)
        trace.epochs.append(epoch)
        trace.hits.append(hit)
        if (epoch, place) == (load.epochs - 1, load.num_samples - 1):
            policy.leave(name, now)
    return trace


def optimum(keys: Sequence[int], num_slots: int) -> np.ndarray:
    """Return whether each use of ``keys`` (samples from 0) hits with ``num_slots`` cached by the optimum."""
    uses = np.asarray(keys, dtype=np.int64)
    # Place of the next use of each use's sample; the number of uses where there is none.
    order = np.argsort(uses, kind="stable")
    following = np.full(uses.size, uses.size, dtype=np.int64)
    same = uses[order[:-1]] == uses[order[1:]]
    following[order[:-1][same]] = order[1:][same]
    hits = np.zeros(uses.size, dtype=bool)
    cached: dict[int, int] = {}  # when each is used next
    farthest: list[tuple[int, int]] = []  # (minus that, key); outdated where `cached` differs
    for at, (key, then) in enumerate(zip(uses.tolist(), following.tolist(), strict=True)):
        hits[at] = key in cached
        cached.pop(key, None)
        if then == uses.size or not num_slots:
            continue  # never used again
        if len(cached) >= num_slots:
            while cached.get(farthest[0][1]) != -farthest[0][0]:
                heappop(farthest)
            if -farthest[0][0] < then:
                continue  # all that is cached is used sooner
            del cached[heappop(farthest)[1]]
        cached[key] = then
        heappush(farthest, (-then, key))
    return hits


if __name__ == "__main__":
    harness.main(options(), bench)
