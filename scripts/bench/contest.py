"""What both kinds of ``penstock bench pipeline`` share: plans, ranks on a link, and what is told of them.

The ranks are told in a private folder and answer there: nothing is pickled, nobody else writes into it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from ...compression.errors import ConfigError, TransportError
from ...compression.names import AUTO
from ...conf.bench import BenchPipelineConfig
from ...pipeline.planner.partition import partition
from ...pipeline.ranks.launch import start_ranks
from ...pipeline.run import build, console
from ...pipeline.run.decide import look, model_name, prepare
from ...pipeline.run.run_folder import RunFolder
from ...stages.files import save_json
from ...stages.planner.plan import Plan
from . import race
from .contestants import Entrant
from .harness import Record
from .race import Race
from .shaped_links import LATENCY_MS, Link, joined
from .torch_pipelines import stages_of

FACTS = ("ranks", "batch_size", "micro_batches", "warmup", "repeats", "steps", "seconds", "seed")
"""The options that ``results.json`` has under ``job``."""


def plans_of(config: BenchPipelineConfig, entrants: Mapping[str, Entrant]) -> dict[str, Plan]:
    """Make the plan of every entrant from one measurement, and fill in the threads of ``config``.

    Raises: PenstockError: an option does not fit, or the model cannot be cut so, by us or for torch's side.
    """
    job, plans = config.job(), {}
    extra = AUTO if AUTO in config.extra_in_flight else config.extra_in_flight[0]
    samples = prepare(job)
    config.threads = job.threads
    build.optimizer(config.optimizer)
    model = build.model(config.model, describe=samples.describe, seed=config.seed)
    profile = look(job, samples, model=model)
    for name, entrant in entrants.items():
        stages = config.ranks * entrant.stages_per_rank
        plans[name] = partition(
            profile,
            stages=stages,
            cuts=cuts_of(config, stages),
            ranks=config.ranks,
            schedule=entrant.schedule,
            micro_batches=config.micro_batches,
            extra_in_flight=0 if entrant.stream else extra,
            codec=config.codecs[0],
            weights=entrant.weights,
        )
        stages_of(model, plans[name])
    return plans


def cuts_of(config: BenchPipelineConfig, stages: int) -> list[str] | None:
    """The given cuts; with one stage on each rank, every second of those for two."""
    if config.cuts is None or len(config.cuts) == stages - 1:
        return config.cuts
    if stages == config.ranks and len(config.cuts) == 2 * config.ranks - 1:
        return config.cuts[1::2]
    raise ConfigError(
        f"{stages} stages need {stages - 1} cuts, found {len(config.cuts)}; give {2 * config.ranks - 1}, of "
        "which schedules with one stage on each rank take every second, or leave cuts out"
    )


def begin(
    record: Record, config: BenchPipelineConfig, plan: Plan, job: Mapping[str, Any], **facts: Any
) -> None:
    """Note what is raced, and say it."""
    common = {"model": model_name(config.job()), "cuts": list(plan.cuts)}
    common |= {name: getattr(config, name) for name in FACTS}
    record.begin(threads=config.threads, job=common | dict(job), **facts)
    record.say(f"{console.short(record.folder.path)}: {title(record.content)}")


def raced(told: Race, plans: Mapping[str, Plan], folder: RunFolder) -> dict[str, Any]:
    """Start the ranks on one link, wait for them, and return what rank 0 measured: ``facts`` and ``runs``.

    Raises: PenstockError: a rank failed, or the link cannot be shaped here.
    """
    ranks = told.config.ranks
    with folder.private() as private, joined(told.link, ranks=ranks) as ends:
        save_json(private.path / "race.json", dataclasses.asdict(told))
        save_plans(plans, private)
        places: dict[str, Any] = {"errors": private.errors, "ends": ends, "device": told.link.device}
        stages = [[rank] for rank in range(ranks)]
        start_ranks(race.__name__, [str(private.path)], stages_of_rank=stages, **places)
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
    """Return what was raced, in a line."""
    job, threads, link = results["job"], results["threads"], results.get("link")
    raced = f"{job['micro_batches']} micro-batches of {job['batch_size'] // job['micro_batches']}, "
    raced += f"{job['ranks']} ranks of {threads} thread{'s' * (threads > 1)}"
    if link:
        return f"{job['model']}, {raced}, codec {job['codec']}, {link['link']}"
    return f"{job['model']} cut after {', '.join(job['cuts'])}, {raced}"
