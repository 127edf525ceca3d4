"""From seconds to the rows of ``results.json`` and to a table for people; no process, no clock."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from ...stages.units import show_bytes
from .entrants import ENTRANTS, TORCH, facts
from .torch_pipelines import CLASSES

CAPTION = (
    "samples/s: medians of runs that take turns with those of the rival; x: median of the ratios of "
    "neighbouring runs. bubble: share of a step in which a rank computes nothing, measured, and simulated "
    "with the median durations of the same instructions (of a stream: by what the busiest rank has to do). "
    "versions: the most distinct versions of the weights alive at once on each stage, and all their bytes."
)


def rows_of(measured: Sequence[Mapping[str, Any]], *, batch_size: int) -> list[dict[str, Any]]:
    """Return a row for each entrant: speeds of both sides, ratios of pairs, and what was measured besides."""
    return [_row(one, batch_size) for one in measured]


def _row(found: Mapping[str, Any], batch_size: int) -> dict[str, Any]:
    theirs, ours = found["rival"], found["penstock"]
    pairs = [rival / own for rival, own in zip(theirs, ours, strict=True)]
    entrant = ENTRANTS[found["name"]]
    measured = {name: value for name, value in found.items() if name not in ("name", "rival", "penstock")}
    return {
        "name": found["name"],
        **facts(entrant),
        "rival_class": CLASSES[entrant.schedule] if entrant.rival == TORCH else None,
        "samples_per_second": batch_size / statistics.median(ours),
        "samples_per_second_of_runs": [batch_size / one for one in ours],
        "rival_samples_per_second": batch_size / statistics.median(theirs),
        "rival_samples_per_second_of_runs": [batch_size / one for one in theirs],
        "speedup": statistics.median(pairs),
        "speedup_of_pairs": pairs,
        **measured,
    }


def table(results: Mapping[str, Any]) -> Table:
    """Return ``results`` for people."""
    shown = Table(title=title(results))
    for heading in ("schedule", "stages"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("samples/s", "rival", "rival's", "x", "pairs", "bubble", "simulated", "versions"):
        shown.add_column(heading, justify="left" if heading == "rival" else "right", no_wrap=True)
    for row in results["rows"]:
        shown.add_row(*_cells(row))
    return shown


def _cells(row: Mapping[str, Any]) -> list[str]:
    pairs = row["speedup_of_pairs"]
    live = [stage["num_live"] for stage in row["versions"]]
    num_bytes = sum(stage["num_bytes"] for stage in row["versions"])
    return [
        row["name"],
        str(row["num_stages"]),
        f"{row['samples_per_second']:.1f}",
        row["rival"],
        f"{row['rival_samples_per_second']:.1f}",
        f"{row['speedup']:.2f}",
        f"{min(pairs):.2f}-{max(pairs):.2f}",
        _shares(row["bubble"]),
        _shares(row["bubble_simulated"]),
        f"{' '.join(map(str, live))}  {show_bytes(num_bytes)}",
    ]


def _shares(of_ranks: Sequence[float]) -> str:
    return " ".join(f"{100 * share:.0f}" for share in of_ranks) + " %"


def title(results: Mapping[str, Any]) -> str:
    """Return what was raced, in a line."""
    job = results["job"]
    return (
        f"{job['model']}, {job['micro_batches']} micro-batches of "
        f"{job['batch_size'] // job['micro_batches']}, "
        f"{job['ranks']} ranks of {results['threads']} thread{'s' * (results['threads'] > 1)}, "
        f"codec {job['codec']}, {results['link']['link']}"
    )


def overhead_lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say what an instruction costs beside its work, in one process and on ranks."""
    return [_overhead(one) for one in found]


def _overhead(one: Mapping[str, Any]) -> str:
    where = f"on {one['ranks']} ranks" if one["ranks"] > 1 else "in one process"
    line = (
        f"scheduling overhead {where}, {one['stages']} stages of one number, {one['micro_batches']} "
        f"micro-batches: {one['microseconds']:.0f} us for each of {one['instructions']} instructions (the "
        f"same work called directly: {one['microseconds_direct']:.0f} us)"
    )
    if "microseconds_of_steps" in one:
        line += (
            f"; a whole step, waiting included: {one['microseconds_of_steps']:.0f} us an instruction, torch "
            f"{one['microseconds_of_torch_steps']:.0f} us"
        )
    return line
