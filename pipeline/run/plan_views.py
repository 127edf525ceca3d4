"""What ``penstock plan`` shows beside a plan: if asked, dependencies, and what fills the memory."""

from __future__ import annotations

from pathlib import Path

from ...conf.parts import MEASURED
from ...conf.planning import PlanningConfig
from ...stages.planner.dependencies import dependencies
from ...stages.planner.memory_table import rows, save, table
from ...stages.planner.network_profile import Profile
from ...stages.planner.plan import Plan
from ...stages.tracing.layer_graph import LayerGraph
from ..weights.optimizers import state_per_byte
from . import build
from .decide import model_name
from .run_folder import RunFolder

_MEASURED = "replicas.shares=measured: training begins with these shares and follows the speed of ranks"


def views(
    config: PlanningConfig, graph: LayerGraph, profile: Profile, plan: Plan, folder: RunFolder
) -> tuple[list[str], list[Path]]:
    """Write what ``config`` asks for into ``folder``; return the lines of the table, and the files.

    Args:    graph, profile: what was recorded and measured of the model; plan: what was made of them.
    Raises:  ConfigError: the folder cannot be written.
    """
    stages = [number for number, stage in enumerate(plan.stages) for _ in stage.layers]
    rule = plan.policy.rule
    versions = [rule.old_versions(stage, plan.num_stages) if rule else 0 for stage in stages]
    state = state_per_byte(build.optimizer(config.optimizer)) if config.optimizer else None
    lines, files = [_MEASURED] if config.replicas.shares == MEASURED else [], list[Path]()
    if config.graph:
        from ...stages.planner.graph_picture import draw  # matplotlib takes a second to import

        found = dependencies(
            graph, profile, optimizer_state=1.0 if state is None else state, old_versions=versions
        )
        found.save(folder.graph)
        draw(folder.graph_picture, found, stages, title=f"{model_name(config)}: dependencies of its layers")
        files += [folder.graph, folder.graph_picture]
    if config.memory.table:
        listed = rows(profile, stages, optimizer_state=state, old_versions=versions)
        save(folder.memory_table, listed)
        lines += ["", *table(listed), ""]
        files.append(folder.memory_table)
    return lines, files
