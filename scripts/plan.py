"""``penstock plan``: what ``train`` would do with the same options, as a table, a JSON file and a picture.

With ``schedule=all`` every schedule is planned and simulated, and the fastest that fits is kept. With
``graph=true`` and ``memory.table=true`` it shows what layers depend on, and what fills the memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..conf.schema import PlanningConfig

if TYPE_CHECKING:
    from ..pipeline.run.run_folder import RunFolder

SCHEMA = PlanningConfig


def main(arguments: Sequence[str]) -> int:
    """Plan as ``arguments`` say; return the exit code."""
    from .application import run

    return run("plan", SCHEMA, _plan, arguments=arguments)


def _plan(config: PlanningConfig, folder: RunFolder, typed: Sequence[str]) -> None:
    from ..pipeline.run import console, counts  # what brings torch, which a refusal does not wait for
    from ..pipeline.run.bounded import recorded_without_memory
    from ..pipeline.run.early import ALL
    from ..pipeline.run.planning import (
        beside,
        compare_schedules,
        decide,
        partition_options,
        prepare,
        read_profile,
        record,
        views,
    )
    from ..pipeline.run.schedule_comparison import check_order

    if config.profile is not None:
        graph, profile = None, read_profile(config)
        chosen = counts.choose(config, None, profile)
    else:
        samples = prepare(config)
        for note in samples.notes:
            console.warn(note)
        with console.planning():
            chosen = counts.choose(config, samples)
            found = recorded_without_memory(config, samples) or record(config, samples)
            graph, profile = found.graph, found.measure(packs=True)
    if chosen:
        console.warn(chosen)
    everything = config.schedule == ALL
    options = partition_options(config)
    if everything:
        plan = compare_schedules(config, profile, folder, options)
    else:
        plan = decide(config, profile, options)
    check_order(plan)
    folder.begin(console.warn)
    folder.save(config, plan)
    if config.profile is None:
        profile.save(folder.profile)
    lines, shown = views(config, graph, profile, plan, folder)
    lines += beside(config, profile, plan, options)
    files = [folder.plan, folder.plan_picture, *([folder.schedules_picture] if everything else []), *shown]
    print(plan, *lines, *map(console.short, files), sep="\n")
