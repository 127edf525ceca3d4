"""``penstock bench convergence``: accuracy over the samples seen, for every policy of the weights.

Asynchronous training has no bubble but old gradients. Whether it learns as well is no law that a test could
prove, so it is shown: the same network, samples and order, several seeds, beside synchronous training.

Source: Narayanan et al., PipeDream, SOSP 2019, section 5.2; PipeDream-2BW, ICML 2021, section 5.1; Chen et
        al., SpecTrain, 2018."""

from __future__ import annotations

import dataclasses
import multiprocessing
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import islice
from typing import Any

from torch import Tensor
from torch.utils.data import Subset

from ...conf.convergence import BenchConvergenceConfig
from ...pipeline.pipeline import Pipeline
from ...pipeline.run import build
from ...pipeline.run.course import training_batches
from ...pipeline.run.decide import decide, prepare
from ...pipeline.run.train import evaluate, loss
from ...pipeline.samples.samples import Samples
from .policies import POLICIES


def check(config: BenchConvergenceConfig) -> list[tuple[str, str, int]]:
    """Return the runs: data set, policy and seed of each; the seeds of one curve are neighbours.

    Raises: PenstockError: an option does not fit.
    """
    policies = config.policies or list(POLICIES)
    build.optimizer(config.optimizer)
    for name in config.sets:
        build.samples(getattr(config, name))
    return [(data, policy, seed) for data in config.sets for policy in policies for seed in config.seeds]


def bench_convergence(
    config: BenchConvergenceConfig, runs: list[tuple[str, str, int]]
) -> Iterator[dict[str, Any]]:
    """Train ``runs``, ``config.processes`` at once; yield what each found, as they end.

    Yields:  ``set``, ``policy``, ``seed``, ``schedule``, ``weights``, ``prediction``, ``lr``, ``updates``,
             ``seconds``, and lists of one length: ``samples`` (seen so far), ``accuracy`` (0 to 1), ``loss``.
    Raises:  PenstockError: a run failed.
    """
    spawn = multiprocessing.get_context("spawn")
    silently = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_DFL)}  # by Ctrl-C
    with ProcessPoolExecutor(config.processes, mp_context=spawn, **silently) as pool:
        futures = [pool.submit(train_one, config, *run) for run in runs]
        try:
            for future in as_completed(futures):
                yield future.result()
        except KeyboardInterrupt:
            for process in multiprocessing.active_children():
                process.terminate()  # the pool would wait until they have trained
            raise
        finally:
            for future in futures:
                future.cancel()


def train_one(config: BenchConvergenceConfig, name: str, policy: str, seed: int) -> dict[str, Any]:
    """Train one job from its start, all stages in this process; return what ``bench_convergence`` yields."""
    chosen = POLICIES[policy]
    job = config.job(name, schedule=chosen.schedule, seed=seed)
    samples = prepare(job)
    plan = dataclasses.replace(decide(job, samples), weights=chosen.weights, prediction=chosen.prediction)
    # An update for every micro-batch: as many more of them, each by as much less.
    updates = config.steps(name) * (config.micro_batches if chosen.each else 1)
    factor = (config.async_lr or 1 / config.micro_batches) if chosen.each else 1.0
    options = job.optimizer | {"lr": job.optimizer["lr"] * factor}
    pipe = Pipeline(
        build.model(job.model, describe=samples.describe, seed=seed),
        plan,
        loss=loss,
        optimizer=build.optimizer(options),
        scheduler=build.scheduler(job.scheduler, num_steps=updates),
        seed=seed,
    )
    tested = dataclasses.replace(samples, test=_first(samples, config.test_samples))
    found: dict[str, list[float]] = {"samples": [], "accuracy": [], "loss": []}
    began, stops = time.monotonic(), _stops(config.steps(name), config.points)
    for number, batch in enumerate(islice(_endless(job, samples), config.steps(name)), start=1):
        pipe.step(*batch)
        if number in stops:
            result = evaluate(pipe, plan, job, tested)  # finishes what is in flight first
            for key, value in {"samples": number * config.batch_size, **result}.items():
                found[key].append(value)
    facts = {"schedule": chosen.schedule, "weights": chosen.weights, "prediction": chosen.prediction}
    facts |= {"lr": options["lr"], "updates": updates, "seconds": time.monotonic() - began}
    return {"set": name, "policy": policy, "seed": seed, **facts, **found}


def _stops(num_steps: int, points: int) -> set[int]:
    """Behind which steps a run is tested; the last one is among them."""
    return {max(1, round(num_steps * (point + 1) / points)) for point in range(points)}


def _endless(job: Any, samples: Samples) -> Iterator[tuple[Tensor, Tensor]]:
    epoch = 0
    while True:
        yield from training_batches(job, samples, epoch=epoch)
        epoch += 1


def _first(samples: Samples, number: int) -> Any:
    """The first test samples: a test costs as much as some steps of training."""
    return Subset(samples.test, range(min(number, len(samples.test))))  # type: ignore[arg-type]
