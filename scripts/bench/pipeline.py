"""``penstock bench pipeline``: our pipeline against torch's own 1F1B, over loopback and over shaped links.

Same model, cut, micro-batches and optimizer on both sides; only ratios of neighbouring runs are compared,
since the speed of a machine differs from minute to minute."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...compression.errors import TransportError
from ...conf.bench import BenchPipelineConfig
from ...pipeline.ranks.launch import start_ranks
from ...pipeline.run.decide import decide, prepare
from ...pipeline.run.run_folder import RunFolder
from ...stages.planner.plan import Plan
from . import race
from .links import LOOPBACK, Link, joined, why_not
from .pipeline_rows import Measured, link_facts, rows_of
from .race import Race
from .torch_pipelines import stages_of


def plan_of(config: BenchPipelineConfig) -> Plan:
    """Make the plan that both sides follow, and fill in the threads of ``config``.

    Raises: PenstockError: an option does not fit, or the model cannot be cut so, by us or for torch's side.
    """
    from ...pipeline.run import build

    job = config.job()
    samples = prepare(job)
    config.threads = job.threads
    build.optimizer(config.optimizer)
    plan = decide(job, samples)
    stages_of(build.model(config.model, describe=samples.describe, seed=config.seed), plan)
    return plan


def bench_pipeline(
    config: BenchPipelineConfig, plan: Plan, links: Sequence[Link], *, folder: Path
) -> Iterator[dict[str, Any]]:
    """Race on each of ``links``; yield, link after link, ``{"link": its facts, "rows": its rows}``.

    The loopback device always comes first: without a link that holds it back, raw frames show what the
    computation alone allows, and every row has this bound beside it. ``folder`` holds ``plan.json``.

    Raises: PenstockError: a rank failed.
    """
    contestants = [(codec, extra) for codec in config.codecs for extra in config.extra_in_flight]
    reference = ("raw", config.extra_in_flight[0])
    on_loopback = contestants if any(link.rate is None for link in links) else []
    free = Race(
        config=config,
        link=Link(name=LOOPBACK),
        contestants=list(dict.fromkeys([*on_loopback, reference])),
    )
    found = _race(free, folder)
    bound = found.run(*reference).samples_per_second(config.batch_size)
    for link in links:
        if link.rate is None:
            measured = found
        elif reason := why_not(link):
            yield {"link": link_facts(link, why_not=reason), "rows": []}
            continue
        else:
            measured = _race(Race(config=config, link=link, contestants=contestants), folder)
        rows = rows_of(link.name, measured, contestants, plan=plan, batch_size=config.batch_size, bound=bound)
        yield {"link": link_facts(link, measured=measured.facts), "rows": rows}


def _race(job: Race, folder: Path) -> Measured:
    """Start the ranks on one link, wait for them, and return what they measured."""
    with RunFolder(path=folder).private() as told:
        job.save(told.path / "race.json")
        shutil.copy(folder / "plan.json", told.plan)
        with joined(job.link, ranks=job.config.ranks) as ends:
            start_ranks(
                race.__name__,
                [str(told.path)],
                errors=told.errors,
                stages_of_rank=[[rank] for rank in range(job.config.ranks)],
                ends=ends,
                device=job.link.device,
            )
        measured = told.path / "measured.json"
        if not measured.exists():
            raise TransportError("the ranks ended without a result; look at their output above")
        return Measured.of(json.loads(measured.read_text()))
