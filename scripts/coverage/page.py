"""The table of what was tried: a summary by library on top, what was refused by its words below."""

import datetime
import importlib.metadata
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.scripts.circumstances import circumstances

Row = Mapping[str, Any]
RESULT_FIELDS = ("result", "lengths_result", "autocast_result")
RESULTS = ("same", "different", "refused", "failed", "timeout", "skipped")
COLUMNS = {
    "network": "name",
    "result": "result",
    "second length, masks": "lengths_result",
    "under autocast": "autocast_result",
    "layers": "layers",
    "cuts": "cuts",
    "layers by their own": "leaves",
    "guards": "guards",
    "trace s": "trace_seconds",
    "measure s": "measure_seconds",
    "Pipeline s": "pipeline_seconds",
    "stages": "stages",
    "largest stage": "largest_stage",
}  # each heading with the field of a row below it


def line(row: Row) -> str:
    """A row as one line of text."""
    whys = "; ".join(f"{why[:300]}{when}" for why, when in _whys(row))
    return f"{row['name']}: {row['result']}, {row.get('seconds', 0)} s {whys}"


def written(rows: Sequence[Row], command: str) -> str:
    """The page."""
    counts, lengths, casts = (_counts(rows, field) for field in RESULT_FIELDS)
    used = [result for result in RESULTS if any(count[result] for count in counts.values())]
    heads = ("same at a second length, masks", "same under autocast")
    summary: list[tuple[str, ...]] = [("library", "networks", *used, *heads)]
    for library, count in sorted(counts.items()):
        second, cast = lengths[library], casts[library]
        further = [f"{one['same']} of {one.total()}" if one else "not run" for one in (second, cast)]
        summary.append((library, *map(str, (count.total(), *(count[result] for result in used))), *further))
    ordered = sorted(rows, key=lambda row: row["name"])
    every = [tuple(_cell(row, field) for field in COLUMNS.values()) for row in ordered]
    parts = ["# Networks that train in three stages with the bits of the plain loop", _preface(command)]
    parts += [_table(summary), "## Every network", _table([tuple(COLUMNS), *every]), *_reasons(rows)]
    return "\n\n".join(parts) + "\n"


def _counts(rows: Sequence[Row], field: str) -> dict[str, Counter[str]]:
    """For each library how often it has each result in ``field``."""
    counts: dict[str, Counter[str]] = {row["name"].partition("/")[0]: Counter() for row in rows}
    for row in rows:
        if result := row.get(field):
            counts[row["name"].partition("/")[0]][result] += 1
    return counts


def _preface(command: str) -> str:
    found = circumstances(())
    processor, *_ = found["hardware"].values()
    versions = [
        f"{name} {_version(name)}" for name in ("torch", "torchvision", "timm", "transformers", "peft")
    ]
    return (
        "Each network, with small inputs and random weights, is recorded, measured, cut into three "
        "stages and trained for a step of two micro-batches in one process; loss, gradients, updated "
        "parameters and buffers are compared with the plain loop on the eager model, bit for bit. "
        "*same*: every bit agrees. *Second length, masks*: the same Pipeline goes on with a batch of another "
        "length (9 tokens for 12, 5 in a decoder for 7) or size (32 pixels more a side); another one, whose "
        "inputs have an attention mask, trains without padding, then with padding, at both lengths; empty "
        "where the plain model takes neither. *Under autocast*: both again, the pipeline with "
        "`autocast=torch.bfloat16`, the plain loop under `torch.autocast('cpu', torch.bfloat16, "
        "cache_enabled=False)`. *Layers by their own*: modules that were taken as one layer because of "
        "what they do. *Guards*: values that forward read into Python. *Largest stage*: its share of the "
        "parameters; in brackets that of the largest layer, where it is more than 90 %. Seconds are "
        "those of a busy machine, without autocast.\n\n"
        "What is not in the table has not been run.\n\n"
        f"`python scripts/coverage {command}`; {', '.join(versions)}; Python "
        f"{found['versions']['python']}; {processor}, one thread, float32; {datetime.date.today()}."
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cell(row: Row, field: str) -> str:
    value = row.get(field, "not run" if field in RESULT_FIELDS else "")
    if field == "leaves" and value != "":
        return str(len(value))
    if field == "largest_stage" and value != "":
        largest = row.get("largest_layer", 0)
        return f"{value:.0%} ({largest:.0%})" if largest > 0.9 else f"{value:.0%}"
    return str(value)


def _whys(row: Row) -> list[tuple[str, str]]:
    """Why a network has not the same bits, and when that is, once where both attempts say the same."""
    further = {row.get("lengths_why"): " at a second length or with masks"}
    found = further | {row.get("autocast_why"): " under autocast", row.get("why"): ""}
    return [(why, when) for why, when in found.items() if why]


def _reasons(rows: Sequence[Row]) -> list[str]:
    home = r"/[^\s:]*/(?=(transformers|timm|torchvision|torch|penstock)/)"  # where somebody keeps a library
    whys = [(row["name"], when, re.sub(home, "", why)) for row in rows for why, when in _whys(row)]
    refused = [f"- {name}{when}: {why[:600]}" for name, when, why in whys]
    leaves = [
        f"- {row['name']}: " + "; ".join(f"`{name}`: {why}" for name, why in list(row["leaves"].items())[:2])
        for row in rows
        if row.get("leaves")
    ]
    parts = ["## What was refused, failed or left out", "\n".join(refused)] if refused else []
    title = "## Modules taken as one layer, and why (the first two)"
    return [*parts, title, "\n".join(leaves)] if leaves else parts


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = ("| " + " | ".join(row) + " |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *rest])
