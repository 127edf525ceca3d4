"""``penstock plan``: what ``train`` would do with the same options, as a table, a JSON file and a picture.

With ``schedule=all`` every schedule is planned and simulated, and the fastest that fits is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..conf.schema import PlanConfig
from . import usage

if TYPE_CHECKING:
    from ..pipeline.run.run_folder import RunFolder


def main(arguments: Sequence[str]) -> int:
    """Plan as ``arguments`` say; return the exit code."""
    if usage.wanted(arguments):
        print(usage.text("plan", PlanConfig))
        return 0
    from ..pipeline.run import early
    from .application import run

    return run("plan", PlanConfig, _plan, arguments=arguments, early=early.check)


def _plan(config: PlanConfig, folder: RunFolder, typed: Sequence[str]) -> None:
    from ..pipeline.run import console  # what brings torch, which a refusal does not wait for
    from ..pipeline.run.decide import compare_schedules, decide, prepare
    from ..pipeline.run.early import ALL
    from ..pipeline.run.schedule_comparison import check_order

    everything = config.schedule == ALL
    samples = prepare(config)
    for note in samples.notes:
        console.warn(note)
    made = compare_schedules(config, samples, folder) if everything else decide(config, samples)
    check_order(made)
    folder.begin(console.warn)
    folder.save(config, made)
    files = [folder.plan, folder.plan_picture, *([folder.schedules_picture] if everything else [])]
    print(made, *map(console.short, files), sep="\n")
