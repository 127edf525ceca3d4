"""Rows of ``penstock bench replicas``: what was measured as people compare it, and as they read it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ...conf.bench_replicas import BenchReplicasConfig
from ...pipeline.planner.programs import step_programs
from ...pipeline.schedules.simulate import simulate_plan
from ...stages.planner.plan import Plan
from ...stages.units import show_bytes
from . import replicas_sides as sides
from .harness import spread
from .replicas_sides import ALONE, EVEN


def described(plan: Plan) -> dict[str, Any]:
    """What a row of results says of a plan, with its step as it was predicted."""
    return {
        "replicas": list(plan.replicas),
        "cuts": list(plan.cuts),
        "exact": plan.exact,
        "seconds_of_stages": [stage.forward_seconds + stage.backward_seconds for stage in plan.stages],
        "predicted": simulate_plan(plan, step_programs(plan)).seconds,
    }


def speed_rows(
    found: Mapping[str, Any], plans: Mapping[str, Plan], config: BenchReplicasConfig
) -> list[dict[str, Any]]:
    """Two ranks by how much slower one is: the share of the speed that both have on their own, summed up."""
    rows = []
    for factor in config.factors:
        turns = found[str(factor)]
        summed = [sum(speeds) for speeds in turns[ALONE]]
        for name in (side for side in turns if side != ALONE):
            speeds = [config.batch_size / seconds for seconds in turns[name]]
            shares = [speed / both for speed, both in zip(speeds, summed, strict=True)]
            rows.append(
                {
                    "side": name if name == EVEN else sides.WEIGHTED,
                    "factor": factor,
                    "samples_per_second": statistics.median(speeds),
                    "samples_per_second_of_runs": speeds,
                    "summed_of_runs": turns[ALONE],
                    "share": statistics.median(shares),
                    "share_of_pairs": shares,
                    "bound": sides.even_share(factor) if name == EVEN else 1.0,
                }
            )
    return rows


def turn_rows(
    found: Mapping[str, Any], plans: Mapping[str, Plan], config: BenchReplicasConfig
) -> list[dict[str, Any]]:
    """Steps of sides that took turns: how many times as fast as the first by neighbours; simulated beside."""
    first, *_ = found
    return [
        {
            "side": name,
            "ranks": plans[name].num_ranks,
            "seconds": statistics.median(one["seconds"]),
            "seconds_of_runs": one["seconds"],
            "speedup": statistics.median(pairs),
            "speedup_of_pairs": pairs,
            "simulated": one["simulated"],
            "predicted": described(plans[name])["predicted"],
            "update": one["update"],
        }
        for name, one in found.items()
        for pairs in [[a / b for a, b in zip(found[first]["seconds"], one["seconds"], strict=True)]]
    ]


def byte_rows(
    found: Mapping[str, Any], plans: Mapping[str, Plan], config: BenchReplicasConfig
) -> list[dict[str, Any]]:
    """What a step of each side sent, all ranks together; what is no frame and no exchange is the rest."""
    rows = []
    for name, one in found.items():
        exchange, total = (sum(one[f"{what}_of_ranks"]) for what in ("exchange", "total"))
        several = zip(one["parameters"], plans[name].replicas, strict=True)
        replicated = sum(size for size, number in several if number > 1)
        rows.append(
            {"side": name, **one, "exchange": exchange, "total": total}
            | {"rest": total - exchange - one["activations"] - one["gradients"]}
            | {"of_parameters": exchange / replicated if replicated else None}
        )
    return rows


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """A row as a person reads it."""
    if "factor" in row:
        share = f"{row['share']:.0%} ({_percent(row['share_of_pairs'])})"
        both = statistics.median(map(sum, row["summed_of_runs"]))
        return {
            "side": row["side"],
            "speeds": f"1:{row['factor']}",
            "samples/s": f"{row['samples_per_second']:.0f}",
            "summed": f"{both:.0f}",
            "share": share,
            "at most": f"{row['bound']:.0%}",
        }
    if "total" in row:
        amounts = {name: row[name] for name in ("activations", "gradients", "exchange", "rest", "total")}
        times = row["of_parameters"]
        return {"side": row["side"]} | {name: show_bytes(size) for name, size in amounts.items()} | {
            "of the parameters": "-" if times is None else f"{times:.2f}x"
        }  # fmt: skip
    return {
        "side": row["side"],
        "ranks": str(row["ranks"]),
        "step": f"{row['seconds']:.3f} s",
        "as fast": f"{row['speedup']:.2f}x ({spread(row['speedup_of_pairs'])})",
        "simulated": f"{row['simulated']:.3f} s",
        "predicted": f"{row['predicted']:.3f} s",
        "update": f"{1e3 * row['update']:.0f} ms",
    }


def _percent(shares: Sequence[float]) -> str:
    return f"{min(shares):.0%}-{max(shares):.0%}"
