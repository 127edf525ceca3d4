"""Hits of several jobs in one cache of samples, and what they save: simulated, and by processes.

``simulated``: hits of jobs that keep their pace next to the optimum, then seconds where jobs wait for
storage. ``real``: the same jobs as processes that read through a broker from a slow store, next to the
simulator; a batch is computed by sleeping, as DLIO does it. ``hit``: microseconds of a sample in the cache,
next to a file in the page cache. ``loaders``: training on a folder of JPEGs, next to the same steps on
batches in memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import product
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from zlib import crc32

import cache_simulator as simulator
import harness
import numpy as np
import torch
from cache_simulator import CONTESTANTS, Load, Outcome, Simulated, TokenBucket, simulate
from harness import Options, Results, alternate, medians, ratio_of_pairs, say, speeds, spread
from torch import nn
from torch.utils.data import DataLoader, Dataset

from penstock.compression.errors import TransportError
from penstock.pipeline.samples import image_folder
from penstock.pipeline.samples.cache.broker import serving
from penstock.pipeline.samples.cache.client import Client
from penstock.pipeline.samples.cache.lru import Lru
from penstock.pipeline.samples.cache.messages import Hello
from penstock.pipeline.samples.cache.pages import PAGE_BYTES, pages_of
from penstock.pipeline.samples.cache.policies import DEFAULT
from penstock.pipeline.samples.cache.policy import Policy, Times
from penstock.pipeline.samples.drawn import order_of
from penstock.pipeline.samples.loader import Loader
from penstock.pipeline.samples.reading import Place, Reading
from penstock.pipeline.samples.shared import Shared, cached
from penstock.stages.units import parse_bytes

NONE = "none"
OVERBOOKED = 2.0
"""Times what storage gives that jobs would read without a cache if they never waited."""

TIMED = ("next_use", "next_use_told")
"""Policies whose hits depend on the epochs' times, so that they also run with times that are wrong."""

CLOSED: dict[tuple[str, str], Callable[[float], float]] = {
    ("lru", "own"): simulator.lru,
    **{(name, "own"): simulator.next_use_own for name in (*TIMED, "next_use_uncapped")},
    **{(name, "same"): simulator.next_use_same for name in (*TIMED, "next_use_uncapped")},
}
"""Hit rates that are known in closed form, by policy and data."""

READ_BEFORE, JOB_SECONDS = -1.0, 600.0
SAMPLES_OF_HITS, BATCH_OF_HITS = 512, 32
QUALITIES = {128: 100, 144: 100, 160: 99, 176: 98, 192: 97, 208: 95, 224: 93}
"""Quality by pixels a side of JPEGs of noise, some 100 kB each."""

BATCH, BATCHES, WORKERS, IN_MEMORY = 16, 10, (0, 1, 2), "in memory"


def options() -> Any:
    """Return the parser of the command line."""
    made = harness.parser(__doc__)
    listed, name_of, count = harness.list_of, harness.name_of, harness.at_least(1)
    size = harness.option(lambda text: parse_bytes(text, name="size"))
    add = made.add_argument
    parts = tuple(PARTS)
    add("--parts", type=listed(name_of(parts)), default=["simulated"], help=f"of {', '.join(parts)}")
    usual = [name for name in CONTESTANTS if name not in ("next_use_uncapped", "next_use_floors")]
    add(
        "--policies",
        type=listed(name_of(tuple(CONTESTANTS))),
        default=usual,
        help=f"of {', '.join(CONTESTANTS)}",
    )
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
    error = "relative error of the epoch that a job announces, in a second run of next_use"
    add("--error", type=harness.between(-1e-9, 0.99), default=0.1, help=error)
    add("--rate", type=size, default=60_000_000, help="bytes a second of the storage where jobs wait for it")
    add("--latency", type=harness.between(-1e-9), default=0.002, help="seconds of a read from it")
    add("--lookahead", type=harness.at_least(0), default=2, help="batches that its readers load ahead")
    add("--seed", type=harness.at_least(0), default=0, help="decides orders, phases and errors")
    return made


def bench(asked: Options, path: Path) -> Results:
    """Measure the parts that are asked for, one after another."""
    names = "num_samples batch_size epochs sample_bytes rate latency lookahead seed".split()
    results = Results(path, job={name: getattr(asked, name) for name in names})
    for part in asked.parts:
        PARTS[part](asked, results)
    return results


# Simulated.


def simulated_part(asked: Options, results: Results) -> None:
    """Simulate jobs that keep their pace, then jobs that wait for storage."""
    results.keep(simulated=list(paced(asked)), waiting=list(waiting(asked)))
    columns = CASE_COLUMNS | {"closed form": "{closed_form:.3f}", "optimum": "{optimum:.3f}"}
    columns |= {"of its hits": "{of_optimum:.1%}"}
    harness.show(results.content["simulated"], columns, left=2)
    harness.show(results.content["waiting"], CASE_COLUMNS | SECONDS_COLUMNS, left=2)


CASE_COLUMNS: dict[str, Any] = {
    "policy": lambda row: row["policy"] + (f", times off by {row['error']:.0%}" if row.get("error") else ""),
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


def _cases(asked: Options) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield data, jobs and share, and the slots of the cache."""
    for data, jobs, share in product(asked.reads, asked.jobs, asked.shares):
        sets = jobs if data == "own" else 1
        yield {"data": data, "jobs": jobs, "share": share}, round(share * sets * asked.num_samples)


def loads(
    asked: Options, data: str, batches: Sequence[float], *, trains: bool, error: float = 0.0
) -> list[Load]:
    """Jobs that take so many seconds for a batch, to train it, or else to take its samples one by one.

    They begin one after another within an epoch of the first; one that is so many times as fast as the mean
    has as many times the epochs. The times that each announces are off by all of ``error``, either way."""
    drawn, mean = random.Random(asked.seed), sum(batches) / len(batches)
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
            error=1 + drawn.choice((-error, error)),
        )
        for number, seconds in enumerate(batches)
    ]


def paced(asked: Options) -> Iterator[dict[str, Any]]:
    """Yield a row for each policy where every job takes a batch a second, whatever it hits."""
    for case, slots in _cases(asked):
        for name in asked.policies:
            for error in dict.fromkeys((0.0, asked.error if name in TIMED else 0.0)):
                # Reading takes next to nothing, but something, and nothing hides it: every sample is wanted.
                run = simulate(
                    loads(asked, case["data"], [1.0] * case["jobs"], trains=False, error=error),
                    CONTESTANTS[name](slots * asked.sample_bytes),
                    storage=TokenBucket(latency=1e-9),
                    sample_seconds=1 / asked.batch_size,
                    seed=asked.seed,
                )
                form = CLOSED.get((name, case["data"]))
                row = {"policy": name, **case, "error": error, "hit_rate": run.hit_rate()}
                row |= {"closed_form": form and form(case["share"])}
                hits = simulator.optimum(run.trace, slots)
                later = [hit for hit, epoch in zip(hits.tolist(), run.epochs, strict=True) if epoch]
                row |= {"optimum": sum(later) / len(later), "of_optimum": run.hits / max(1, int(hits.sum()))}
                yield row


def paces(asked: Options, jobs: int) -> list[float]:
    """Seconds of a batch of each job where storage is too slow for all, 0.5 to 2 times the usual there."""
    batch = jobs * asked.batch_size * asked.sample_bytes / asked.rate / OVERBOOKED
    return [batch * 2 ** (2 * number / max(1, jobs - 1) - 1) for number in range(jobs)]


def waiting(asked: Options) -> Iterator[dict[str, Any]]:
    """Yield a row for each policy where storage is too slow for the jobs, the slowest a quarter as fast."""
    for case, slots in _cases(asked):
        listed = loads(asked, case["data"], paces(asked, case["jobs"]), trains=True)
        without: dict[str, Outcome] = {}
        for name in (NONE, *asked.policies):
            run = _simulate(asked, listed, _policy(name, slots * asked.sample_bytes))
            without = without or run.jobs
            yield {"policy": name, **case} | job_facts(run.jobs, without)


def _policy(name: str, capacity: int) -> Policy:
    return Lru(0) if name == NONE else CONTESTANTS[name](capacity)


def _bucket(asked: Options) -> TokenBucket:
    return TokenBucket(asked.rate, latency=asked.latency, burst=asked.rate * asked.latency)


def _simulate(asked: Options, listed: Sequence[Load], policy: Policy) -> Simulated:
    more: dict[str, Any] = {"lookahead": asked.lookahead, "warm_up": True, "seed": asked.seed}
    return simulate(listed, policy, storage=_bucket(asked), **more)


def job_facts(jobs: Mapping[str, Outcome], without: Mapping[str, Outcome]) -> dict[str, Any]:
    """Hits, seconds and utilisation of jobs, and their speed relative to the same without a cache."""
    ended = list(jobs.values())
    whole = Simulated(jobs=dict(jobs), trace=[], epochs=[])
    total, before = (sum(one.seconds for one in side.values()) for side in (jobs, without))
    return {
        "hit_rate": whole.hit_rate(),
        "loads": sum(one.loads for one in ended),
        "makespan": whole.makespan,
        "seconds": total / len(ended),
        "speedup": before / total,
        "utilisation": statistics.mean(one.utilisation for one in ended),
        "stall_share": statistics.mean(one.stall_share for one in ended),
    }


# Real jobs.


class RealLoad(Load):
    """A job with the orders that ``penstock.cached`` draws; its seed is its number."""

    def order(self, epoch: int, seed: int) -> list[int] | None:
        """Return the samples of an epoch."""
        if epoch >= self.epochs:
            return None
        return order_of(self.num_samples, seed=seed_of(self), epoch=epoch).tolist()


def seed_of(load: Load) -> int:
    """Return the seed of a job."""
    return int(load.name.removeprefix("job"))


class SlowStore:
    """Made-up files of noise, behind a rate that all processes share: no page cache can answer instead."""

    def __init__(self, num_bytes: int, bucket: TokenBucket, granted: Any) -> None:
        self.num_bytes, self._bucket, self._granted = num_bytes, bucket, granted

    def read(self, number: int) -> bytes:
        """Return the bytes of a file after the latency, and when the rate grants them."""
        with self._granted.get_lock():
            self._bucket.granted, now = self._granted.value, time.monotonic()
            end = self._bucket.read(self.num_bytes, now)
            self._granted.value = self._bucket.granted
        time.sleep(end - now)
        return made_up(number, self.num_bytes)


def made_up(number: int, num_bytes: int) -> bytes:
    """Return the bytes of a file, always the same."""
    return np.random.Generator(np.random.SFC64(number)).bytes(num_bytes)


class Watched(Dataset[Any]):
    """Of each sample the checksum of its bytes, and the seconds that reading took, if it was read now."""

    def __init__(self, store: SlowStore, first: int, num_samples: int) -> None:
        self._store, self._first, self._num_samples = store, first, num_samples
        self._seconds = dict[int, float]()

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[int, float]:
        return self.decode(index, self.read(index))

    def read(self, index: int) -> bytes:
        """Return the bytes of a sample."""
        start = time.perf_counter()
        data = self._store.read(self._first + index)
        self._seconds[index] = time.perf_counter() - start
        return data

    def decode(self, index: int, data: bytes) -> tuple[int, float]:
        """Return (checksum, seconds)."""
        return crc32(data), self._seconds.pop(index, READ_BEFORE)


@dataclass(slots=True, kw_only=True)
class Ended:
    """Outcome of a job; ``digest``: of the bytes of all samples, in their order."""

    outcome: Outcome
    digest: int = 0


def run_job(load: Load, lookahead: int, data: Any, socket: Path | None, pipe: Connection) -> None:
    """Run a job as a process: say that it is ready, begin when told, and send its outcome."""
    seed, shared = seed_of(load), {"job": load.name, "batch_size": load.batch_size, "epochs": load.epochs}
    if socket is not None:
        data = cached(data, seed=seed, data=load.reads, socket=socket, **shared)
    pipe.send(True)
    zero = pipe.recv()
    begin = zero + load.start
    time.sleep(max(0.0, begin - time.monotonic()))
    ended = Ended(outcome=Outcome(name=load.name, begin=load.start))
    for epoch in range(load.epochs):
        _run_epoch(load, lookahead, data, epoch, ended)
        if not epoch and isinstance(data, Shared):
            seconds = time.monotonic() - begin
            sample_io = ended.outcome.reading / max(1, ended.outcome.loads)
            hidden = load.training if lookahead else 0.0
            io = {"batch_io": sample_io * load.batch_size, "sample_io": sample_io, "hidden": hidden}
            times = Times(epoch=seconds, augmentation=0.0, training=load.training, **io)
            data.through.cache.measured(times)
    if isinstance(data, Shared):
        data.through.cache.close()
    ended.outcome.end = time.monotonic() - zero
    pipe.send(ended)


def _run_epoch(load: Load, lookahead: int, data: Any, epoch: int, ended: Ended) -> None:
    outcome = ended.outcome
    order: Any = order_of(load.num_samples, seed=seed_of(load), epoch=epoch).tolist()
    # Forked, as torch does by itself in a process that was not forked from a server.
    ahead = {"num_workers": 1, "prefetch_factor": lookahead, "multiprocessing_context": "fork"}
    sampler = data.sampler if isinstance(data, Shared) else order
    options: Any = {"sampler": sampler, "generator": torch.Generator(), **(ahead if lookahead else {})}
    batches = iter(DataLoader(data, load.batch_size, **options))
    outcome.uses.append(load.num_samples)
    outcome.hits.append(0)
    while True:
        start = time.monotonic()
        batch = next(batches, None)
        if batch is None:
            break
        outcome.stalled += time.monotonic() - start
        checksums, seconds = batch
        ended.digest = crc32(checksums.numpy().tobytes(), ended.digest)
        read = seconds[seconds != READ_BEFORE]
        outcome.loads += len(read)
        outcome.hits[-1] += len(seconds) - len(read)
        outcome.reading += float(read.sum())
        outcome.computing += load.training
        time.sleep(load.training)


@contextlib.contextmanager
def broker(socket: Path, policy: str, slots: int, num_bytes: int) -> Iterator[None]:
    """Serve a cache for so many samples in a process, until the block ends."""
    context: Any = multiprocessing.get_context("forkserver")
    ours, life = context.Pipe()
    arguments = socket, policy, slots * pages_of(num_bytes, PAGE_BYTES) * PAGE_BYTES, life
    process = context.Process(target=_serve, args=arguments, name="cache", daemon=True)
    process.start()
    life.close()
    try:
        try:
            ours.recv()
        except EOFError:
            raise TransportError("the cache did not begin; see its output above") from None
        yield
    finally:
        ours.close()
        _end(process)


def _serve(socket: Path, policy: str, capacity: int, life: Connection) -> None:
    with serving(socket, CONTESTANTS[policy](capacity), tell=print) as serves:
        life.send(True)
        serves.run(until=life.poll, pause=0.1)


def _end(process: Any) -> None:
    process.join(10)
    if process.is_alive():
        process.kill()
        process.join()


def real_part(asked: Options, results: Results) -> None:
    """Run the jobs without a cache and with each policy, next to the simulator."""
    results.keep(real=[])
    context: Any = multiprocessing.get_context("forkserver")
    for case, slots in _cases(asked):
        plain = loads(asked, case["data"], paces(asked, case["jobs"]), trains=True)
        listed = [RealLoad(**{f.name: getattr(load, f.name) for f in fields(load)}) for load in plain]
        without: dict[str, Ended] = {}
        for policy in (NONE, *asked.policies):
            store = SlowStore(asked.sample_bytes, _bucket(asked), context.Value("d", -np.inf))
            with contextlib.ExitStack() as stack:
                socket = None
                if policy != NONE:
                    home = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-"))
                    socket = Path(home, "cache.sock")
                    stack.enter_context(broker(socket, policy, slots, asked.sample_bytes))
                jobs = [(load, asked.lookahead, _data(store, load), socket) for load in listed]
                done = side_by_side(context, jobs)
            without = without or done
            outcomes, before = ({n: one.outcome for n, one in side.items()} for side in (done, without))
            run = _simulate(asked, listed, _policy(policy, slots * asked.sample_bytes))
            row = {"policy": policy, **case, **job_facts(outcomes, before)}
            row["same_samples"] = all(done[name].digest == one.digest for name, one in without.items())
            results.keep(real=[row | {"simulated": job_facts(run.jobs, run.jobs)}])
    columns = (
        CASE_COLUMNS | {"simulated": lambda row: f"{row['simulated']['hit_rate']:.3f}"} | SECONDS_COLUMNS
    )
    columns |= {"simulated ": lambda row: f"{row['simulated']['makespan']:.1f} s", "same": "{same_samples}"}
    harness.show(results.content["real"], columns, left=2)


def _data(store: SlowStore, load: Load) -> Watched:
    return Watched(store, seed_of(load) * load.num_samples if load.data is None else 0, load.num_samples)


def side_by_side(context: Any, jobs: Sequence[tuple[Any, ...]]) -> dict[str, Ended]:
    """Run jobs in processes, all from one moment on; return what each sent.

    Raises: TransportError: one was lost, or they took too long."""
    running: list[tuple[str, Any, Connection]] = []

    def receive(name: str, pipe: Connection, seconds: float) -> Any:
        if not wait([pipe], max(0.0, seconds)):
            raise TransportError(f"{name} does not end; lower --num-samples or --epochs, or raise --rate")
        try:
            return pipe.recv()
        except EOFError:
            raise TransportError(f"{name} was lost; see its output above") from None

    try:
        for arguments in jobs:
            ours, theirs = context.Pipe()
            process = context.Process(target=run_job, args=(*arguments, theirs), name=arguments[0].name)
            process.start()
            theirs.close()
            running.append((arguments[0].name, process, ours))
        for name, _, pipe in running:
            receive(name, pipe, JOB_SECONDS)
        zero, end = time.monotonic() + 0.1, time.monotonic() + JOB_SECONDS
        for _, _, pipe in running:
            pipe.send(zero)
        return {name: receive(name, pipe, end - time.monotonic()) for name, _, pipe in running}
    finally:
        for _, process, pipe in running:
            pipe.close()
            _end(process)


# A hit.


def hit_part(asked: Options, results: Results) -> None:
    """Let epochs of hits and of file reads take turns; measure microseconds of a sample."""
    number, size = SAMPLES_OF_HITS, asked.sample_bytes
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        home, files = Path(name), [made_up(index, size) for index in range(number)]
        paths = [home / f"{index:06}" for index in range(number)]
        for path, data in zip(paths, files, strict=True):
            path.write_bytes(data)
        counts: Any = {"num_samples": number, "batch_size": BATCH_OF_HITS, "epochs": 1 << 20}
        hello = Hello(job="hits", run="1", data="made up", **counts)
        with (
            broker(home / "cache.sock", DEFAULT, number, size),
            contextlib.closing(Client(home / "cache.sock", hello, tell=_refuse)) as client,
        ):
            orders = [random.Random(asked.seed + seed).sample(range(number), number) for seed in range(2)]
            epochs = iter(range(1 << 20))

            def epoch(read: Callable[[list[int]], int], begin: bool) -> float:
                epoch = next(epochs) if begin else 0
                order = orders[epoch % 2]
                if begin:
                    client.begin(epoch, order, orders[(epoch + 1) % 2])
                start = time.perf_counter()
                num_read = sum(read(order[at : at + BATCH_OF_HITS]) for at in range(0, number, BATCH_OF_HITS))
                seconds = time.perf_counter() - start
                if num_read != number and epoch:
                    raise TransportError(
                        f"the cache had {num_read} of {number} samples that were stored in it"
                    )
                return seconds / number * 1e6

            def hits(batch: list[int]) -> int:
                return sum(hit is not None for hit in client.use(batch))

            def store(batch: list[int]) -> int:
                client.use(batch)
                client.store(batch, [files[index] for index in batch])
                return 0

            epoch(store, True)
            sides = {
                "hit": partial(epoch, hits, True),
                "file in the page cache": partial(
                    epoch, lambda batch: len([paths[index].read_bytes() for index in batch]), False
                ),
            }
            alternate(sides, 1)
            taken = alternate(sides, 20 * asked.repeats)
    facts = {"batch": BATCH_OF_HITS, "sample_bytes": size, "microseconds": medians(taken), "runs": taken}
    results.keep(hit=facts)
    for side, microseconds in facts["microseconds"].items():
        say(f"{side}: {microseconds:.1f} us a sample of {size} bytes ({spread(taken[side])})")


def _refuse(sentence: str) -> None:
    raise TransportError(sentence)


# Loaders.


def loaders_part(asked: Options, results: Results) -> None:
    """Train resnet18 on a folder of JPEGs, by the number of processes that load, an epoch each in turn."""
    from torchvision.models import resnet18

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        sizes = write_images(Path(name), BATCH * BATCHES, seed=asked.seed)
        reading = Reading(
            tables={"train": image_folder.load(root=name, size=64).train}, batch_size=BATCH, seed=asked.seed
        )
        places = [Place("train", 0, number) for number in range(BATCHES)]
        batches = [batch for place in places if (batch := reading[place].batch) is not None]
        torch.manual_seed(asked.seed)
        model = resnet18(num_classes=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def train(given: Any) -> float:
            start = time.perf_counter()
            for inputs, targets in given:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
            return (time.perf_counter() - start) / BATCHES

        def load(workers: int) -> float:
            with contextlib.closing(Loader(reading, places, workers=workers)) as loader:
                return train(map(loader.take, places))

        sides: dict[str, Callable[[], float]] = {IN_MEMORY: partial(train, batches)}
        sides |= {f"workers={workers}": partial(load, workers) for workers in WORKERS}
        alternate(sides, 1)
        taken = alternate(sides, asked.repeats)
    rows = [
        {"side": side} | speeds(runs, BATCH) | ratio_of_pairs(taken[IN_MEMORY], runs)
        for side, runs in taken.items()
    ]
    facts = {"file_bytes": statistics.mean(sizes), "size": 64, "batch_size": BATCH, "batches": BATCHES}
    results.keep(loaders=facts | {"rows": rows})
    columns: dict[str, Any] = {"side": "{side}", "samples/s": "{samples_per_second:.1f}"}
    harness.show(rows, columns | {"of memory": lambda row: f"{row['speedup']:.2f}x"})


def write_images(root: Path, number: int, *, seed: int) -> list[int]:
    """Write noise as JPEGs of unlike sizes, two classes of it; return the bytes of each file."""
    from PIL import Image

    drawn, sizes, sides = np.random.default_rng(seed), [], list(QUALITIES)
    for split, count in (("train", number), ("val", 2)):
        for index in range(count):
            side = sides[index % len(sides)]
            file = root / split / f"class{index % 2}" / f"{index:05}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = drawn.integers(0, 256, (side, side, 3), np.uint8)
            Image.fromarray(pixels).save(file, quality=QUALITIES[side], subsampling=0)
            if split == "train":
                sizes.append(file.stat().st_size)
    return sizes


PARTS: dict[str, Callable[[Options, Results], None]] = {
    "simulated": simulated_part,
    "real": real_part,
    "hit": hit_part,
    "loaders": loaders_part,
}


if __name__ == "__main__":
    harness.main(options(), bench)
