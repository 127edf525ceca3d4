"""Accuracy over the samples seen, for every policy of the weights.

Asynchronous training has no bubble but old gradients. Whether it learns as well is no law that a test could
prove, so it is measured: the same network, samples and order, several seeds, next to synchronous training.

Source: Narayanan et al., PipeDream, SOSP 2019, section 5.2; PipeDream-2BW, ICML 2021, section 5.1; Chen et
al., SpecTrain, 2018."""

from __future__ import annotations

import dataclasses
import itertools
import multiprocessing
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import harness
from harness import Job, Options, Results, say
from torch.utils.data import Subset

from penstock.conf.schema import TrainConfig
from penstock.pipeline.run.planning import count_updates, decide, model_name, training_batches
from penstock.pipeline.run.train import assemble
from penstock.pipeline.run.training_loop import evaluate

ASYNCHRONOUS: dict[str, Any] = {"schedule": "async_1f1b", "weights": "latest", "prediction": False}
POLICIES: dict[str, dict[str, Any]] = {
    "synchronous": ASYNCHRONOUS | {"schedule": "1f1b"},
    "double_buffered": ASYNCHRONOUS | {"schedule": "1f1b", "weights": "double_buffered"},
    "stashed": ASYNCHRONOUS | {"weights": "stashed"},
    "latest": ASYNCHRONOUS,
    "prediction": ASYNCHRONOUS | {"prediction": True},
}


def options() -> Any:
    """Return the parser of the command line."""
    job = "model=resnet18 cuts=[layer1,layer2,layer3] batch_size=64 micro_batches=4 scheduler=cosine"
    made = harness.parser(__doc__, job=job)
    listed, count = harness.list_of, harness.at_least(1)
    add = made.add_argument
    sets = listed(harness.name_of(("digits", "fashion_mnist")))
    add("--sets", type=sets, default=["digits", "fashion_mnist"], help="data sets to train on")
    names = ", ".join(POLICIES)
    add(
        "--policies",
        type=listed(harness.name_of(tuple(POLICIES))),
        default=list(POLICIES),
        help=f"of {names}",
    )
    add("--seeds", type=listed(harness.at_least(0)), default=[0, 1, 2], help="seeds, a run each")
    add("--digits-steps", type=count, default=176, help="batches of a run on digits")
    add("--fashion-mnist-steps", type=count, default=320, help="batches of a run on fashion_mnist")
    add("--points", type=count, default=8, help="tests of a run, evenly spread")
    add("--test-samples", type=count, default=2000, help="test samples that count, the first ones")
    rate = "relative learning rate of asynchronous updates; none: 1 / micro_batches"
    add("--async-lr", type=harness.between(0), help=rate)
    add("--processes", type=count, default=2, help="runs at once, each on one thread")
    return made


def bench(asked: Options, path: Path) -> Results:
    """Train under every policy of the weights; runs are printed and kept one by one."""
    fields = ("batch_size", "micro_batches", "cuts", "optimizer", "scheduler")
    configs = {name: config_of(asked, name, 0) for name in asked.sets}
    first = configs[asked.sets[0]]
    job = {name: getattr(first, name) for name in fields} | {"model": model_name(first)}
    job |= {"points": asked.points, "test_samples": asked.test_samples}
    results = Results(path, threads=1, job=job, runs=[])
    runs = list(itertools.product(asked.sets, asked.policies, asked.seeds))
    for number, run in enumerate(train_all(asked, runs), start=1):
        results.keep(runs=[run])
        text = f"{run['set']} {run['policy']} seed {run['seed']}: {run['accuracy'][-1]:.2%} after"
        text += f" {run['updates']} updates from lr {run['lr']:g}, {run['seconds']:.0f} s"
        say(f"{number}/{len(runs)} {text}")
    rows = [
        {"set": name, "policy": policy, **{key: 100 * values[-1] for key, values in curve.items()}}
        for name in asked.sets
        for policy, curve in curves(results.content["runs"], name).items()
    ]
    columns = {"set": "{set}", "policy": "{policy}", "accuracy": "{mean:.2f} % ({least:.2f}-{most:.2f})"}
    harness.show(rows, columns, left=2)
    return results


def config_of(asked: Options, name: str, seed: int) -> TrainConfig:
    """Compose the job of one run; all stages are in its process, since no bit depends on where they are."""
    steps = getattr(asked, f"{name}_steps")
    defaults = {"model": "resnet18", "cuts": "[layer1,layer2,layer3]", "batch_size": 64, "micro_batches": 4}
    defaults |= {"scheduler": "cosine", "codec": "raw"}
    fixed = {"data": name, "seed": seed, "ranks": 1, "threads": 1, "max_steps": steps, "epochs": steps}
    return harness.train_config(asked.job, defaults, fixed)


def train_all(asked: Options, runs: Sequence[tuple[str, str, int]]) -> Iterator[dict[str, Any]]:
    """Train runs (data set, policy, seed), several at once; yield their results."""
    spawn = multiprocessing.get_context("spawn")
    silently = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_DFL)}  # by Ctrl-C
    with ProcessPoolExecutor(asked.processes, mp_context=spawn, **silently) as pool:
        try:
            for future in as_completed([pool.submit(train_one, asked, run) for run in runs]):
                yield future.result()
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()  # the pool would wait until they have trained
            raise


def train_one(asked: Options, run: tuple[str, str, int]) -> dict[str, Any]:
    """Train one job; return its facts, and lists of ``samples`` seen, ``accuracy`` (0 to 1) and ``loss``."""
    name, policy, seed = run
    config, chosen = config_of(asked, name, seed), POLICIES[policy]
    config.schedule = chosen["schedule"]
    if config.schedule == ASYNCHRONOUS["schedule"]:
        # Every micro-batch is an update, and changes the weights by as much less.
        config.optimizer["lr"] *= asked.async_lr or 1 / config.micro_batches
    job, num_steps = Job(config), config.max_steps or 0
    versions = {key: chosen[key] for key in ("weights", "prediction")}
    plan = dataclasses.replace(decide(config, job.samples), **versions)
    pipe = assemble(config, plan, job.samples, job.model())
    # A test costs as much as some steps of training: only the first samples.
    num_samples = min(asked.test_samples, len(job.samples.test))  # type: ignore[arg-type]
    tested = dataclasses.replace(job.samples, test=Subset(job.samples.test, range(num_samples)))  # type: ignore[arg-type]
    facts = {"set": name, "policy": policy, "seed": seed, **chosen, "lr": config.optimizer["lr"]}
    curve: dict[str, list[float]] = {"samples": [], "accuracy": [], "loss": []}
    start, stops = time.monotonic(), stops_of(num_steps, asked.points)
    epochs = (training_batches(config, job.samples, epoch=epoch) for epoch in itertools.count())
    batches = itertools.islice(itertools.chain.from_iterable(epochs), num_steps)
    for number, batch in enumerate(batches, start=1):
        pipe.step(*batch)
        if number in stops:
            result = evaluate(pipe, plan, config, tested.batches("test", batch_size=config.batch_size))
            for key, value in {"samples": number * config.batch_size, **result}.items():
                curve[key].append(value)
    updates = count_updates(config, job.samples)
    return {**facts, "updates": updates, "seconds": time.monotonic() - start, **curve}


def stops_of(num_steps: int, points: int) -> set[int]:
    """Steps after which a run is tested; the last is one of them."""
    return {max(1, round(num_steps * (point + 1) / points)) for point in range(points)}


def curves(runs: Sequence[Mapping[str, Any]], data: str) -> dict[str, dict[str, list[float]]]:
    """Mean, least and most accuracy of the seeds of each policy, at every test."""
    found = {}
    for policy in POLICIES:
        if seeds := [run for run in runs if (run["set"], run["policy"]) == (data, policy)]:
            columns = list(zip(*(run["accuracy"] for run in seeds), strict=True))
            ways = {"mean": statistics.mean, "least": min, "most": max}
            found[policy] = {key: list(map(way, columns)) for key, way in ways.items()}
    return found


if __name__ == "__main__":
    harness.main(options(), bench)
