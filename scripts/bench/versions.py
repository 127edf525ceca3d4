"""How many versions of its weights each stage keeps at most while it trains, and their bytes: counted.

PipeDream keeps as many as it may ever need; how few are enough is a claim, so it is measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...pipeline.pipeline import Pipeline
from ...pipeline.ranks.world import World
from ...pipeline.schedules.instruction import Instruction


def peak_versions(pipe: Pipeline, take_steps: Callable[[], object]) -> list[dict[str, int]]:
    """Look at every stage after each instruction of ``take_steps()``; collective.

    Returns: per stage ``num_live`` (distinct versions, the newest among them), ``num_bytes`` (what they took
             at the most) and ``parameter_bytes`` (one version).
    """
    peak = {index: {"num_live": 0, "num_bytes": 0} for index in pipe.stages}

    def look(stage: int) -> None:
        weights, most = pipe.stages[stage].weights, peak[stage]
        most["num_live"] = max(most["num_live"], weights.num_live)
        most["num_bytes"] = max(most["num_bytes"], weights.num_bytes)

    def watched(run: Callable[[Instruction], None]):
        def run_and_look(instruction: Instruction) -> None:
            run(instruction)
            look(instruction.stage)

        return run_and_look

    kept = pipe.engine.run
    pipe.engine.run = {op: watched(run) for op, run in kept.items()}
    try:
        take_steps()
    finally:
        pipe.engine.run = kept
    rows: list[tuple[int, dict[str, Any]]] = []
    for of_rank in World.default().all_gather_json(sorted(peak.items())):
        rows += [(stage, found) for stage, found in of_rank]
    sizes = _parameter_bytes(pipe)
    found = [most | {"parameter_bytes": sizes[stage]} for stage, most in sorted(rows, key=lambda row: row[0])]
    # Weights count what they keep beside the parameters, which are the newest version.
    return [one | {"num_bytes": one["num_bytes"] + one["parameter_bytes"]} for one in found]


def _parameter_bytes(pipe: Pipeline) -> list[int]:
    sizes = {name: parameter.nbytes for name, parameter in pipe.update.named.items()}
    of_all = {
        name: size for of_rank in World.default().all_gather_json(sizes) for name, size in of_rank.items()
    }
    return [sum(of_all.get(name, 0) for name in stage.parameters) for stage in pipe.plan.stages]
