"""``penstock plan``: what ``train`` would do with the same options, as a table, a JSON file and a picture.

With ``schedule=all`` every schedule is planned and simulated, and the fastest that fits is kept."""

from __future__ import annotations

from collections.abc import Sequence

from ..conf.schema import PlanConfig
from . import usage


def main(arguments: Sequence[str]) -> int:
    """Plan as ``arguments`` say; return the exit code."""
    if usage.wanted(arguments):
        print(usage.text("plan", PlanConfig))
        return 0
    from ..pipeline import console
    from ..pipeline.compare import ALL, check_order
    from ..pipeline.decide import compare_schedules, decide, prepare
    from ..pipeline.run_folder import RunFolder
    from .application import run

    def plan(config: PlanConfig, folder: RunFolder, typed: Sequence[str]) -> None:
        everything = config.schedule == ALL
        made = compare_schedules(config, folder) if everything else decide(config, prepare(config))
        check_order(made)
        folder.begin(console.warn)
        folder.save(config, made)
        files = [folder.plan, folder.plan_picture, *([folder.schedules_picture] if everything else [])]
        print(made, *map(console.short, files), sep="\n")

    return run("plan", PlanConfig, plan, arguments=arguments)
