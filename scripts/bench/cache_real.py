"""The part ``real`` of ``penstock bench cache``: jobs that read through a broker from a slow store, in
processes of their own, beside what the simulator says of the same jobs.

A batch is computed by sleeping, as DLIO does it, so that utilisation is that of MLPerf Storage."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import product
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from ...compression.errors import TransportError
from ...conf.bench_cache import BenchCacheConfig
from ...pipeline.samples.cache.broker import serving as broker
from ...pipeline.samples.cache.loads import Load, Outcome
from ...pipeline.samples.cache.pages import PAGE_BYTES, pages_of
from ...pipeline.samples.cache.simple import NeverEvict
from ...pipeline.samples.cache.simulator import Simulated, simulate
from ...pipeline.samples.cache.storage import TokenBucket
from ...pipeline.samples.drawn import order_of
from ...stages.units import parse_bytes
from . import slow_store
from .beside import beside, processes
from .cache_job import Ended, Job, run
from .cache_sides import CONTESTANTS, SERVED
from .cache_simulated import NONE, loads, paces
from .harness import Record, table

PAGE_CACHE = "page cache"
_SECONDS = 600.0  # that all jobs of a row may take

Row = dict[str, Any]


class _Told(Load):
    """A job with the orders that ``penstock.cached`` draws."""

    def order(self, epoch: int, seed: int) -> list[int] | None:
        """The samples of an epoch in the order of the real job."""
        if epoch >= self.epochs:
            return None
        return order_of(self.num_samples, seed=seed_of(self), epoch=epoch).tolist()


def seed_of(load: Load) -> int:
    """The seed of a job: its number."""
    return int(load.name.removeprefix("job"))


def bench(config: BenchCacheConfig, record: Record) -> None:
    """Run all that is asked for, row by row, and print them."""
    record.keep(real=[])
    for data, jobs, share in product(config.reads, config.jobs, config.shares):
        for row in rows(config, data, jobs, share):
            record.keep(real=[row])
            record.say(sentence(row))
    record.screen.print(table(shown(record.content["real"]), left=["policy", "data"]))


def rows(config: BenchCacheConfig, data: str, jobs: int, share: float) -> Iterator[Row]:
    """A row without a cache, one with the system's, and one for each policy that a broker has."""
    bucket, listed = bucket_of(config), _jobs(config, data, jobs)
    sets = jobs if data == "own" else 1
    slots = round(share * sets * config.num_samples)
    num_bytes = parse_bytes(config.sample_bytes, name="sample_bytes")
    files = slow_store.MadeUp(num_samples=sets * config.num_samples, num_bytes=num_bytes)
    case = {"data": data, "jobs": jobs, "share": share}
    without: Mapping[str, Ended] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        home = Path(name)
        for policy in (NONE, PAGE_CACHE, *(one for one in config.policies if one in SERVED)):
            with contextlib.ExitStack() as opened:
                socket = folder = store = None
                if policy == PAGE_CACHE:
                    folder = _written(files, home / "files")
                else:
                    store = opened.enter_context(slow_store.serving(home / "store.sock", files, bucket))
                if policy not in (NONE, PAGE_CACHE):
                    socket = home / "cache.sock"
                    opened.enter_context(served(socket, policy, slots, num_bytes))
                options: Any = {"store": store, "folder": folder, "socket": socket}
                done = side_by_side(
                    [
                        Job(
                            load=load,
                            seed=seed_of(load),
                            first=seed_of(load) * config.num_samples if data == "own" else 0,
                            lookahead=config.lookahead,
                            **options,
                        )
                        for load in listed
                    ]
                )
            without = without or done
            told = None if policy == PAGE_CACHE else simulated(config, listed, policy, slots, bucket)
            yield {"policy": policy, **case} | _found(done, without) | _told(told)


def bucket_of(config: BenchCacheConfig) -> TokenBucket:
    """The store of ``config``, from which nobody has read."""
    rate = parse_bytes(config.rate, name="rate")
    return TokenBucket(rate, latency=config.latency, burst=rate * config.latency)


def served(socket: Path, policy: str, slots: int, num_bytes: int) -> contextlib.AbstractContextManager[None]:
    """A broker in a process of its own, with room for so many samples."""
    return beside(f"cache by {policy}", _serve, socket, policy, slots * pages_of(num_bytes, PAGE_BYTES))


def _serve(socket: Path, policy: str, pages: int, life: Connection) -> None:
    with broker(socket, CONTESTANTS[policy](pages * PAGE_BYTES), tell=print) as serves:
        life.send(True)
        serves.run(until=life.poll, pause=0.1)


def _jobs(config: BenchCacheConfig, data: str, jobs: int) -> list[Load]:
    """The jobs of the simulated part, with the orders of real ones."""
    plain = loads(config, data, paces(config, jobs), trains=True)
    return [_Told(**{field.name: getattr(load, field.name) for field in fields(load)}) for load in plain]


def simulated(
    config: BenchCacheConfig, listed: Sequence[Load], policy: str, slots: int, bucket: TokenBucket
) -> Simulated:
    """The same jobs in the simulator."""
    num_bytes = parse_bytes(config.sample_bytes, name="sample_bytes")
    return simulate(
        listed,
        NeverEvict(0) if policy == NONE else CONTESTANTS[policy](slots * num_bytes),
        storage=TokenBucket(bucket.rate, latency=bucket.latency, burst=bucket.burst),
        lookahead=config.lookahead,
        warm_up=True,
        seed=config.seed,
    )


def side_by_side(jobs: Sequence[Job]) -> dict[str, Ended]:
    """Run jobs in processes of their own, all from one moment on.

    Raises: TransportError: one was lost, or they took too long."""
    context, running = processes(), []
    try:
        for job in jobs:
            ours, theirs = context.Pipe()
            process = context.Process(target=run, args=(job, theirs), name=job.load.name)
            process.start()
            theirs.close()
            running.append((job, process, ours))
        for job, _, pipe in running:
            _heard(job, pipe, _SECONDS)
        zero, until = time.monotonic() + 0.1, time.monotonic() + _SECONDS
        for _, _, pipe in running:
            pipe.send(zero)
        return {job.load.name: _heard(job, pipe, until - time.monotonic()) for job, _, pipe in running}
    finally:
        for _, process, pipe in running:
            pipe.close()
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _heard(job: Job, pipe: Connection, seconds: float) -> Any:
    if not wait([pipe], max(0.0, seconds)):
        raise TransportError(f"{job.load.name} does not end; lower num_samples or epochs, or raise rate")
    try:
        return pipe.recv()
    except EOFError:
        raise TransportError(f"{job.load.name} was lost; see what it said above") from None


def _written(files: slow_store.MadeUp, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for index in range(len(files)):
        (folder / f"{index:06}").write_bytes(files.read(index))
    return folder


def _found(done: Mapping[str, Ended], without: Mapping[str, Ended]) -> Row:
    """What was measured; seconds are beside those without a cache, and so are the samples' bytes."""
    ended = [one.outcome for one in done.values()]
    whole = Simulated(jobs={one.name: one for one in ended}, trace=[], epochs=[])
    mean, before = (sum(one.outcome.seconds for one in side.values()) for side in (done, without))
    return {
        "hit_rate": whole.hit_rate(),
        "loads": sum(one.loads for one in ended),
        "makespan": whole.makespan,
        "seconds": mean / len(ended),
        "speedup": before / mean,
        "utilisation": _mean(ended, "utilisation"),
        "stall_share": _mean(ended, "stall_share"),
        "same_samples": all(done[name].digest == one.digest for name, one in without.items()),
    }


def _told(told: Simulated | None) -> Row:
    if told is None:
        return {}
    ended = list(told.jobs.values())
    return {
        "simulated": {
            "hit_rate": told.hit_rate(),
            "loads": sum(one.loads for one in ended),
            "makespan": told.makespan,
            "utilisation": _mean(ended, "utilisation"),
        }
    }


def _mean(ended: Sequence[Outcome], name: str) -> float:
    return sum(getattr(one, name) for one in ended) / len(ended)


def shown(found: Sequence[Row]) -> list[dict[str, str]]:
    """The rows of the table: measured, and simulated behind it."""
    made = []
    for row in found:
        told = row.get("simulated")
        made.append(
            {
                "policy": row["policy"],
                "data": row["data"],
                "jobs": str(row["jobs"]),
                "capacity": f"{row['share']:.0%}",
                "hit rate": f"{row['hit_rate']:.3f}",
                "simulated": f"{told['hit_rate']:.3f}" if told else "",
                "loads": str(row["loads"]),
                "makespan": f"{row['makespan']:.1f} s",
                "simulated ": f"{told['makespan']:.1f} s" if told else "",
                "beside none": f"{row['speedup']:.2f}x",
                "utilisation": f"{row['utilisation']:.2f}",
                "simulated  ": f"{told['utilisation']:.2f}" if told else "",
                "samples": "the same" if row["same_samples"] else "OTHERS",
            }
        )
    return made


def sentence(row: Row) -> str:
    """One row, while the others run."""
    return ", ".join(f"{name.strip()} {value}" for name, value in shown([row])[0].items() if value)
