"""``penstock bench convergence``: accuracy over the samples seen, for every policy of the weights.

Asynchronous training has no bubble but old gradients. Whether it learns as well is no law that a test could
prove, so it is shown: the same network, samples and order, several seeds, beside synchronous training.

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
from typing import TYPE_CHECKING, Any

from torch.utils.data import Subset

from ...conf.convergence import BenchConvergenceConfig
from ...pipeline.run import build
from ...pipeline.run.decide import decide, prepare
from ...pipeline.run.epochs import evaluate
from ...pipeline.run.run_length import count_updates, training_batches
from ...pipeline.run.train import assemble
from . import picture
from .contestants import POLICIES
from .harness import Record
from .picture import GREY, colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

OPTIONS = ("cuts", "batch_size", "micro_batches", "points", "test_samples", "optimizer", "scheduler")
_APART = 0.055  # of the height of a panel: what two labels need


def bench(config: BenchConvergenceConfig, record: Record) -> None:
    """Train under every policy of the weights; what is done is told and kept, run by run.

    Raises: PenstockError: an option does not fit, or a run failed.
    """
    build.optimizer(config.optimizer)
    for name in config.sets:
        build.samples(getattr(config, name))
    runs = list(itertools.product(config.sets, config.policies or POLICIES, config.seeds))
    job = {"model": config.model.get("name") or config.model["_target_"].rpartition(".")[2]}
    record.begin(threads=1, job=job | {name: getattr(config, name) for name in OPTIONS}, runs=[])
    for number, found in enumerate(train_all(config, runs), start=1):
        record.keep(runs=[found])
        told = f"{found['set']} {found['policy']} seed {found['seed']}: {found['accuracy'][-1]:.2%} after"
        told += f" {found['updates']} updates from lr {found['lr']:g}, {found['seconds']:.0f} s"
        print(f"{number}/{len(runs)} {told}", flush=True)
    for name in config.sets:
        for policy, curve in curves(record.content["runs"], name).items():
            ends = f"{curve['mean'][-1]:.2%} ({curve['least'][-1]:.2%}-{curve['most'][-1]:.2%})"
            print(f"{name:<15} {policy:<17} {ends}")


def train_all(
    config: BenchConvergenceConfig, runs: Sequence[tuple[str, str, int]]
) -> Iterator[dict[str, Any]]:
    """Train ``runs`` (data set, policy, seed), ``config.processes`` at once; yield what each found.

    Yields:  ``set``, ``policy``, ``seed``, ``schedule``, ``weights``, ``prediction``, ``lr``, ``updates``,
             ``seconds``, and lists of one length: ``samples`` (seen so far), ``accuracy`` (0 to 1), ``loss``.
    Raises:  PenstockError: a run failed.
    """
    spawn = multiprocessing.get_context("spawn")
    silently = {"initializer": signal.signal, "initargs": (signal.SIGINT, signal.SIG_DFL)}  # by Ctrl-C
    with ProcessPoolExecutor(config.processes, mp_context=spawn, **silently) as pool:
        try:
            for future in as_completed([pool.submit(train_one, config, run) for run in runs]):
                yield future.result()
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()  # the pool would wait until they have trained
            raise


def train_one(config: BenchConvergenceConfig, run: tuple[str, str, int]) -> dict[str, Any]:
    """Train one job from its start, all stages in this process; return what ``train_all`` yields."""
    (name, policy, seed), num_steps = run, config.steps(run[0])
    chosen = POLICIES[policy]
    job = config.job(name, schedule=chosen.schedule, seed=seed)
    job.epochs = num_steps  # as many as it takes
    # Where every micro-batch is an update, each changes the weights by as much less.
    job.optimizer["lr"] *= (config.async_lr or 1 / config.micro_batches) if chosen.each else 1.0
    samples = prepare(job)
    plan = dataclasses.replace(decide(job, samples), weights=chosen.weights, prediction=chosen.prediction)
    pipe = assemble(job, plan, samples, build.model(job.model, describe=samples.describe, seed=seed))
    facts = {"schedule": chosen.schedule, "weights": chosen.weights, "prediction": chosen.prediction}
    facts |= {"set": name, "policy": policy, "seed": seed, "lr": job.optimizer["lr"]}
    facts["updates"] = count_updates(job, samples)
    # A test costs as much as some steps of training: only the first samples.
    first: Any = Subset(samples.test, range(min(config.test_samples, len(samples.test))))  # type: ignore[arg-type]
    tested = dataclasses.replace(samples, test=first)
    found: dict[str, list[float]] = {"samples": [], "accuracy": [], "loss": []}
    began, stops = time.monotonic(), stops_of(num_steps, config.points)
    endless = itertools.chain.from_iterable(
        training_batches(job, samples, epoch=epoch) for epoch in itertools.count()
    )
    for number, batch in enumerate(itertools.islice(endless, num_steps), start=1):
        pipe.step(*batch)
        if number in stops:
            batches = tested.batches("test", batch_size=config.batch_size)
            result = evaluate(pipe, plan, job, batches)  # finishes what is in flight first
            for key, value in {"samples": number * config.batch_size, **result}.items():
                found[key].append(value)
    return {**facts, "seconds": time.monotonic() - began, **found}


def stops_of(num_steps: int, points: int) -> set[int]:
    """Behind which steps a run is tested; the last one is among them."""
    return {max(1, round(num_steps * (point + 1) / points)) for point in range(points)}


def curves(runs: Sequence[Mapping[str, Any]], data: str) -> dict[str, dict[str, list[float]]]:
    """Return by policy on ``data``: ``samples``; of its seeds' accuracies ``mean``, ``least``, ``most``."""
    found = {}
    for policy in POLICIES:
        if seeds := [run for run in runs if (run["set"], run["policy"]) == (data, policy)]:
            columns = list(zip(*(run["accuracy"] for run in seeds), strict=True))
            ways = {"mean": statistics.mean, "least": min, "most": max}
            found[policy] = {key: list(map(way, columns)) for key, way in ways.items()}
            found[policy]["samples"] = list(seeds[0]["samples"])
    return found


def figure(results: Mapping[str, Any]) -> Figure:
    """A panel per data set, a line per policy with its name at its end, the range of its seeds around it."""
    sets = list(dict.fromkeys(run["set"] for run in results["runs"]))
    made, panels = picture.panels(len(sets), size=(7.5 * max(1, len(sets)), 5.0))
    for axes, name in zip(panels, sets, strict=False):
        _panel(axes, curves(results["runs"], name))
        y = "test accuracy, %: mean and range over seeds"
        picture.name(axes, f"{results['job']['model']} on {name}", x="training samples seen", y=y)
    return made


def _panel(axes: Axes, found: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    colours = {policy: colour(i - 1) if i else GREY for i, policy in enumerate(POLICIES)}
    for policy, curve in found.items():
        mean, least, most = ([100 * share for share in curve[key]] for key in ("mean", "least", "most"))
        x, own = curve["samples"], colours[policy]
        axes.plot(x, mean, color=own, linewidth=1.8, marker=".", label=policy)
        axes.fill_between(x, least, most, color=own, alpha=0.15, linewidth=0)
    low, high = axes.get_ylim()
    ends = {policy: (100 * curve["mean"][-1] - low) / (high - low) for policy, curve in found.items()}
    style: dict[str, Any] = {"xycoords": "axes fraction", "fontsize": 9, "va": "center"}
    for policy, at in apart(ends).items():
        label = f"{POLICIES[policy].label} {100 * found[policy]['mean'][-1]:.1f}"
        axes.annotate(label, (1.01, at), color=colours[policy], **style)
    axes.set_xlim(left=0)
    axes.grid(axis="y", color="#E4E7EB", linewidth=0.8)


def apart(ends: Mapping[str, float]) -> dict[str, float]:
    """Where labels stand, in shares of a panel: at the end of their line, moved apart where they overlap."""
    places: dict[str, float] = {}
    for name, end in sorted(ends.items(), key=lambda item: item[1]):
        places[name] = max(end, max(places.values(), default=-1.0) + _APART)
    above = 1.0 + _APART
    for name in reversed(places):  # and down again where they would leave the panel
        above = places[name] = min(places[name], above - _APART)
    return places
