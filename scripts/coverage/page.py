"""The table of what was tried: a summary by library on top, what was refused by its words below."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
RESULTS = ("same", "different", "refused", "failed", "timeout", "skipped", "traced")
COLUMNS = (
    "network",
    "result",
    "layers",
    "cuts",
    "layers by their own",
    "guards",
    "trace s",
    "measure s",
    "Pipeline s",
    "stages",
    "largest stage",
)


def line(row: Row) -> str:
    """A row as one line of text."""
    facts = {
        k: row[k]
        for k in (
            "layers",
            "cuts",
            "leaves",
            "guards",
            "trace_seconds",
            "pipeline_seconds",
            "seconds",
            "largest_stage",
        )
        if k in row
    }
    return f"{row['name']}: {row['result']} {facts} {row.get('why', '')[:300]}"


def written(rows: Sequence[Row], command: str) -> str:
    """The page."""
    libraries = sorted({row["name"].partition("/")[0] for row in rows})
    counts = {
        library: Counter(row["result"] for row in rows if row["name"].startswith(f"{library}/"))
        for library in libraries
    }
    used = [result for result in RESULTS if any(count[result] for count in counts.values())]
    summary = [("library", "networks", *used)]
    summary += [
        (library, str(sum(counts[library].values())), *(str(counts[library][result]) for result in used))
        for library in libraries
    ]
    table = [COLUMNS, *(_cells(row) for row in sorted(rows, key=lambda row: row["name"]))]
    parts = [
        "# Networks that train in three stages with the bits of the plain loop",
        _preface(command),
        _table(summary),
    ]
    parts += ["## Every network", _table(table), *_reasons(rows)]
    return "\n\n".join(parts) + "\n"


def _preface(command: str) -> str:
    versions = ", ".join(
        f"{name} {_version(name)}" for name in ("torch", "torchvision", "timm", "transformers")
    )
    return (
        "Each network, with small inputs and random weights, is recorded, measured, cut into three "
        "stages and trained for a step of two micro-batches in one process; loss, gradients, updated "
        "parameters and buffers are compared with the plain loop on the eager model, bit for bit. "
        "*same*: every bit agrees. *Layers by their own*: modules that were taken as one layer because "
        "of what they do. *Guards*: values that forward read into Python. *Largest stage*: its share of "
        "the parameters; in brackets that of the largest layer, where it is more than 90 %. Seconds are "
        "those of a busy machine.\n\n"
        "What is not in the table has not been run.\n\n"
        f"`python -m penstock.scripts.coverage {command}`; {versions}; Python {platform.python_version()}; "
        f"{_processor()}, one thread, float32; {datetime.date.today()}."
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def _cells(row: Row) -> tuple[str, ...]:
    share = f"{row['largest_stage']:.0%}" if "largest_stage" in row else ""
    if row.get("largest_layer", 0) > 0.9:
        share += f" ({row['largest_layer']:.0%})"
    numbers = (
        "layers",
        "cuts",
        "leaves",
        "guards",
        "trace_seconds",
        "measure_seconds",
        "pipeline_seconds",
        "stages",
    )
    cells = (str(len(row[n]) if n == "leaves" and n in row else row.get(n, "")) for n in numbers)
    return row["name"], row["result"], *cells, share


def _told(why: str) -> str:
    """A message without the folder in which somebody keeps a library."""
    return re.sub(r"/[^\s:]*/(?=(transformers|timm|torchvision|torch|penstock)/)", "", why)[:600]


def _reasons(rows: Sequence[Row]) -> list[str]:
    found = [row for row in rows if row.get("why")]
    leaves = [row for row in rows if row.get("leaves")]
    parts = []
    if found:
        parts += [
            "## What was refused, failed or left out",
            "\n".join(f"- {r['name']}: {_told(r['why'])}" for r in found),
        ]
    if leaves:
        told = [
            f"- {r['name']}: " + "; ".join(f"`{k}`: {v}" for k, v in list(r["leaves"].items())[:2])
            for r in leaves
        ]
        parts += ["## Modules taken as one layer, and why (the first two)", "\n".join(told)]
    return parts


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *rest])
