"""``penstock plan``: what ``train`` would do with the same options, as a table, a JSON file and a picture."""

from __future__ import annotations

from collections.abc import Sequence

from ..conf.schema import PlanConfig
from . import usage


def main(arguments: Sequence[str]) -> int:
    """Plan as ``arguments`` say; return the exit code."""
    if usage.wanted(arguments):
        print(usage.text("plan", PlanConfig))
        return 0
    from ..pipeline.console import short
    from ..pipeline.run_folder import RunFolder
    from ..pipeline.train import decide, prepare
    from .application import run

    def plan(config: PlanConfig, folder: RunFolder, typed: Sequence[str]) -> None:
        folder.claim()
        made = decide(config, prepare(config))
        folder.save(config, made)
        print(made, short(folder.plan), short(folder.plan_picture), sep="\n")

    return run("plan", PlanConfig, plan, arguments=arguments)
