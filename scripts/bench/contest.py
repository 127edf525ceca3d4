"""What both kinds of ``penstock bench pipeline`` share: the job, its ranks on a link, and what is told.

The ranks are told in a private folder and answer there: nothing is pickled, nobody else writes into it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ...compression.errors import TransportError
from ...conf.bench import BenchPipelineConfig
from ...conf.schema import PlanConfig
from ...pipeline.ranks.launch import start_ranks
from ...pipeline.run import build
from ...pipeline.run.decide import model_name, prepare
from ...pipeline.run.run_folder import RunFolder
from ...pipeline.samples.samples import Samples
from ...stages.files import save_json
from ...stages.planner.plan import Plan
from . import race
from .harness import Record
from .race import Race
from .shaped_links import LATENCY_MS, Link, joined

WIDTH = 150


def model_of(config: BenchPipelineConfig) -> tuple[PlanConfig, Samples, nn.Module]:
    """Set up the job of a race: its options, data and model; fill in the threads of ``config``.

    Raises: PenstockError: an option does not fit.
    """
    job = config.job()
    samples = prepare(job)
    config.threads = job.threads
    build.optimizer(config.optimizer)
    return job, samples, build.model(config.model, describe=samples.describe, seed=config.seed)


def record(
    config: BenchPipelineConfig,
    plan: Plan,
    folder: RunFolder,
    typed: Sequence[str],
    job: Mapping[str, Any],
    **facts: Any,
) -> Record:
    """Begin ``results.json`` with what is raced."""
    names = ("ranks", "batch_size", "micro_batches", "warmup", "repeats", "steps", "seconds", "seed")
    common = {"model": model_name(config.job()), "cuts": list(plan.cuts)} | {
        name: getattr(config, name) for name in names
    }
    return Record(
        "pipeline", typed, folder, width=WIDTH, threads=config.threads, job=common | dict(job), **facts
    )


def raced(told: Race, plans: Mapping[str, Plan], folder: RunFolder) -> dict[str, Any]:
    """Start the ranks on one link, wait for them, and return what rank 0 measured: ``facts`` and ``runs``.

    Raises: PenstockError: a rank failed, or the link cannot be shaped here.
    """
    ranks = told.config.ranks
    with folder.private() as private:
        save_json(private.path / "race.json", dataclasses.asdict(told))
        save_plans(plans, private)
        with joined(told.link, ranks=ranks) as ends:
            places = {"errors": private.errors, "ends": ends, "device": told.link.device}
            start_ranks(
                race.__name__, [str(private.path)], stages_of_rank=[[rank] for rank in range(ranks)], **places
            )
        measured = private.path / "measured.json"
        if not measured.exists():
            raise TransportError("the ranks ended without a result; look at their output above")
        return json.loads(measured.read_text())


def save_plans(plans: Mapping[str, Plan], folder: RunFolder) -> None:
    """Write each plan under its name."""
    folder.plans.mkdir(exist_ok=True)
    for name, plan in plans.items():
        plan.save(folder.plans / f"{name}.json")


def link_facts(link: Link, measured: Mapping[str, Any], *, why_not: str | None = None) -> dict[str, Any]:
    """Return what ``results.json`` says of a link; ``why_not``: why it was not shaped, nor raced on."""
    shaped = link.rate is not None and why_not is None
    facts: dict[str, Any] = {"link": link.name, "shaped": shaped, "why_not": why_not, "rate": link.rate}
    if shaped:
        facts |= {"burst": link.burst, "latency_ms": LATENCY_MS, "delay_ms": link.delay}
    return facts | dict(measured)


def title(results: Mapping[str, Any]) -> str:
    """Return how the job was raced, in a line."""
    job = results["job"]
    of_each = job["batch_size"] // job["micro_batches"]
    threads = f"{results['threads']} thread{'s' * (results['threads'] > 1)}"
    return f"{job['micro_batches']} micro-batches of {of_each}, {job['ranks']} ranks of {threads}"
