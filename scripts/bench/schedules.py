"""``penstock bench pipeline schedule=all``: every schedule and every policy of the weights on one job.

Where the number of stages is the same, so is the cut: rows differ in the order of the work alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...compression.errors import ConfigError, TransportError
from ...conf.bench import BenchPipelineConfig
from ...pipeline.ranks.launch import start_ranks
from ...pipeline.run import build
from ...pipeline.run.course import example_inputs
from ...pipeline.run.decide import prepare
from ...pipeline.run.run_folder import RunFolder
from ...stages.planner.measure import measure
from ...stages.planner.partition import partition
from ...stages.planner.plan import Plan
from ...stages.tracing.graph import trace
from . import schedules_race
from .entrants import Entrant, rivals
from .links import Link, joined, why_not
from .overhead import overhead
from .schedules_race import Told
from .torch_pipelines import stages_of

STAGES_OF_OVERHEAD = 4
"""Stages in one process on which the cost of an instruction is measured as well."""


def plans_of(config: BenchPipelineConfig, chosen: Mapping[str, Entrant]) -> dict[str, Plan]:
    """Make the plan of every entrant and rival from one measurement, and fill in the threads of ``config``.

    Raises: PenstockError: an option does not fit, or the model cannot be cut so, by us or for torch's side.
    """
    job = config.job()
    samples = prepare(job)
    config.threads = job.threads
    build.optimizer(config.optimizer)
    model = build.model(config.model, describe=samples.describe, seed=config.seed)
    example = example_inputs(job, samples)
    profile = measure(trace(model, example), example)
    plans = {}
    for name, entrant in (dict(chosen) | rivals(dict(chosen))).items():
        stages = config.ranks * entrant.stages_per_rank
        plans[name] = partition(
            profile,
            stages=stages,
            cuts=_cuts(config, stages),
            ranks=config.ranks,
            schedule=entrant.schedule,
            micro_batches=config.micro_batches,
            extra_in_flight=0 if entrant.stream else config.extra_in_flight[0],
            codec=config.codecs[0],
            weights=entrant.weights,
        )
        stages_of(model, plans[name])
    return plans


def _cuts(config: BenchPipelineConfig, stages: int) -> list[str] | None:
    """The given cuts; with one stage on each rank, every second of those for two."""
    if config.cuts is None or len(config.cuts) == stages - 1:
        return config.cuts
    if stages == config.ranks and len(config.cuts) == 2 * config.ranks - 1:
        return config.cuts[1::2]
    raise ConfigError(
        f"{stages} stages need {stages - 1} cuts, found {len(config.cuts)}; give {2 * config.ranks - 1}, of "
        "which schedules with one stage on each rank take every second, or leave cuts out"
    )


def bench_schedules(
    config: BenchPipelineConfig, chosen: Mapping[str, Entrant], link: Link, *, folder: Path
) -> dict[str, Any]:
    """Race; return what rank 0 measured: ``facts`` and ``rows``. ``folder`` holds ``plans/NAME.json``.

    Raises: PenstockError: a rank failed, or the link cannot be shaped here.
    """
    if reason := why_not(link):
        raise TransportError(f"links=[{link.name}] could not be shaped: {reason}")
    job = Told(config=config, link=link, raced=list(chosen), beside=list(rivals(dict(chosen))))
    with RunFolder(path=folder).private() as told:
        job.save(told.path / "race.json")
        shutil.copytree(folder / "plans", told.plans)
        with joined(link, ranks=config.ranks) as ends:
            start_ranks(
                schedules_race.__name__,
                [str(told.path)],
                errors=told.errors,
                stages_of_rank=[[rank] for rank in range(config.ranks)],
                ends=ends,
                device=link.device,
            )
        measured = told.path / "measured.json"
        if not measured.exists():
            raise TransportError("the ranks ended without a result; look at their output above")
        found = json.loads(measured.read_text())
    alone = overhead(stages=STAGES_OF_OVERHEAD, micro_batches=config.micro_batches, repeats=config.repeats)
    found["facts"]["overhead"] = [alone, found["facts"]["overhead"]]
    return found
