"""Table of what fills a rank's memory, layer by layer, for people and as rows for programs.

Source: docs/sources.md, system E, S1 and S11-S13: kinds, sizes and lifetimes of intermediate
        data by (layer, order of saving), dependencies inside a layer and to others, reference counts."""

import csv
import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..files import writing
from ..units import shortened_name, show_bytes, text_table
from .network_profile import Profile

MOST_ROWS = 60
SAVED = "saved"
_HEADINGS = ("stage", "layer", "data", "shape", "bytes", "zeros", "saved", "read", "shared")
_RIGHT = ("stage", "bytes", "zeros")
_FOOTNOTES = (
    "per micro-batch; shape: of the largest; shared: who else made it, or reads it in its backward",
    "saved F3: by the forward of layer 3; read B5 to B3: by the backwards of layers 5 to 3, then it is free",
    "weights: parameters, their gradients, optimizer state and old versions, once a stage",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One datum of a layer: of what kind, how large, and from when to when it is kept.

    ``layer``: that saved it first, or is the first to use those parameters. ``saved_at``, ``read_first_at``
    and ``read_last_at``: layers, of the forward and of the backward; -1 where that says nothing."""

    stage: int
    layer: int
    name: str
    module: str
    order: int = -1
    group: str = "weights"
    kind: str
    value: str = ""
    shape: str
    dtype: str = ""
    num_bytes: int
    zeros: float = 0.0
    made_by: str = ""
    saved_at: int = -1
    read_first_at: int = -1
    read_last_at: int = -1
    readers: int = 0
    shared_with: str = ""


def rows(
    profile: Profile,
    stages: Sequence[int],
    *,
    optimizer_state: float | None = None,
    old_versions: Sequence[int] = (),
) -> list[Row]:
    """Every saved tensor in the order of saving, and behind those of a layer its parameters and what they
    take along.

    Args:    stages: of each layer, its stage; old_versions: of each layer, those kept of its parameters.
             optimizer_state: bytes that the optimizer keeps for each of a parameter's; None: taken as one."""
    found = []
    state = 1.0 if optimizer_state is None else optimizer_state
    of_layer = [
        functools.partial(Row, stage=stage, layer=index, name=layer.name, module=layer.module)
        for index, (layer, stage) in enumerate(zip(profile.layers, stages, strict=True))
    ]
    # 1. what was saved
    for one in profile.intermediates:
        maker = profile.layers[one.maker].name if one.maker >= 0 else "input"
        others = [maker] * (one.maker != one.layer)
        for other in one.savers[1:]:
            elsewhere = f" (stage {stages[other]})" if stages[other] != stages[one.layer] else ""
            others.append(profile.layers[other].name + elsewhere)
        found.append(
            of_layer[one.layer](
                order=one.order,
                group=SAVED,
                kind=one.kind,
                value=one.value,
                shape="x".join(map(str, one.shape)) or "scalar",
                dtype=one.dtype,
                num_bytes=one.num_bytes,
                zeros=one.zeros,
                made_by=maker,
                saved_at=one.layer,
                read_first_at=one.savers[-1],
                read_last_at=one.layer,
                readers=one.readers,
                shared_with=", ".join(dict.fromkeys(others)),
            )
        )
    # 2. parameters, and what they need
    for index, layer in enumerate(profile.layers):
        versions, shape = float(old_versions[index] if old_versions else 0), str(layer.num_parameters)
        times = {"parameters": 1.0, "gradients": 1.0, "optimizer state": state, "old versions": versions}
        for kind, factor in times.items():
            if num_bytes := math.ceil(factor * layer.parameter_bytes):
                found.append(of_layer[index](kind=kind, shape=shape, num_bytes=num_bytes))
    return sorted(found, key=lambda row: (row.layer, row.group != SAVED, row.order))


def save(path: str | Path, found: Iterable[Row]) -> None:
    """Write all rows as CSV, whole or not at all, else ConfigError."""
    names = [field.name for field in dataclasses.fields(Row)]
    with writing(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in found)


def table(found: Sequence[Row], *, most: int = MOST_ROWS) -> list[str]:
    """The lines of the table: the largest data, for each stage the sum of the smaller ones, and a total."""
    stages = list(dict.fromkeys(row.stage for row in found))
    shown = {id(row) for row in sorted(found, key=lambda row: -row.num_bytes)[: most - len(stages)]}
    lines: list[tuple[str, ...]] = []
    for stage in stages:
        own = [row for row in found if row.stage == stage]
        lines += [_shown(row) for row in own if id(row) in shown]
        if rest := [row for row in own if id(row) not in shown]:
            lines.append((str(stage), "smaller", *_sums(rest)))
        lines.append((str(stage), "total", *_sums(own)))
    return [*text_table(_HEADINGS, lines, right=_RIGHT), *_FOOTNOTES]


def _shown(row: Row) -> tuple[str, ...]:
    start = (str(row.stage), f"{row.layer} {shortened_name(row.name, 32)}")
    if row.group != SAVED:
        return (*start, row.kind, row.shape, show_bytes(row.num_bytes), "", "", "", "")
    read = dict.fromkeys((f"B{row.read_first_at}", f"B{row.read_last_at}"))
    return (
        *(*start, row.kind, f"{row.shape} {row.dtype}", show_bytes(row.num_bytes), f"{row.zeros:.0%}"),
        *(f"F{row.saved_at}", " to ".join(read), shortened_name(row.shared_with, 40)),
    )


def _sums(rows: Sequence[Row]) -> tuple[str, ...]:
    """Cells from the third on: what was saved, bytes of weights; bytes and zeros of what was saved."""
    saved = [row for row in rows if row.group == SAVED]
    whole = sum(row.num_bytes for row in saved)
    weights = sum(row.num_bytes for row in rows) - whole
    zeros = f"{sum(row.zeros * row.num_bytes for row in saved) / whole:.0%}" if whole else ""
    return f"{len(saved)} saved, weights {show_bytes(weights)}", "", show_bytes(whole), zeros, "", "", ""
