"""``penstock bench offload``: what it costs to move to a tier what is not read right now.

Sides take turns, as everywhere; where a peak is measured, every run has a process of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...conf.bench_offload import BenchOffloadConfig
from . import offload_disk, offload_packed, offload_placement, picture
from .harness import Record, table
from .picture import Bars, colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FACTS = ("batch_size", "micro_batches", "codec", "repeats", "steps", "warmup", "seed")


def bench(config: BenchOffloadConfig, record: Record) -> None:
    """Measure the cases that are asked for, one after another.

    Raises: PenstockError: an option does not fit, or a run failed."""
    record.begin(threads=config.threads, job={name: getattr(config, name) for name in FACTS})
    if "disk" in config.cases:
        offload_disk.bench(config, record)
        record.screen.print(table(offload_disk.rows(record.content["disk"]), left=["contestant"]))
    if "packed" in config.cases:
        offload_packed.bench(config, record)
    if "placement" in config.cases:
        offload_placement.bench(config, record)


def figure(results: Mapping[str, Any]) -> Figure:
    """A panel for each case: steps beside their bound, packed steps beside kept ones, and gaps."""
    there = [(case, draw) for case, draw in _PANELS.items() if results.get(case)]
    made, panels = picture.panels(len(there), size=(11.0, 3.8 * len(there)), columns=1)
    for axes, (case, draw) in zip(panels, there, strict=True):
        draw(axes, results[case])
    return made


def _disk(axes: Axes, found: Mapping[str, Any]) -> None:
    rows = [row for row in found["rows"] if not row.get("killed")]
    names = [_broken(offload_disk.shown(row)) for row in rows]
    runs = [row["seconds_of_runs"] for row in rows]
    sides = [
        Bars("a step", colour(0), [row["seconds"] for row in rows], runs),
        Bars("its bound: computing,\nwriting or reading", picture.GREY, [row["roofline"] for row in rows]),
    ]
    picture.bars(axes, names, sides, form="%.2f")
    picture.name(axes, f"{found['model']}, everything kept and with a tier on disk", y="seconds (median)")


def _packed(axes: Axes, found: list[Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(row["network"] for row in found))
    sides = []
    for number, cores in enumerate(dict.fromkeys(offload_packed.where(row) for row in found)):
        rows = {row["network"]: row for row in found if offload_packed.where(row) == cores}
        own = [rows[name] for name in names]
        runs = [row["ratio_of_pairs"] for row in own]
        sides.append(Bars(f"step, kept : packed\n{cores}", colour(number), [r["ratio"] for r in own], runs))
    shares = [next(offload_packed.left(row) for row in found if row["network"] == name) for name in names]
    sides.append(Bars("bytes left of those saved", picture.GREY, shares))
    picture.bars(axes, [_broken(name) for name in names], sides, form="%.2f")
    picture.name(axes, "The tier packed", y="ratio")


def _placement(axes: Axes, found: list[Mapping[str, Any]]) -> None:
    laid = [row for row in found if row["gap"] is not None]
    sides = [Bars("above what lives at once", colour(0), [100 * row["gap"] for row in laid])]
    picture.bars(axes, [_broken(row["name"]) for row in laid], sides, form="%.2f")
    picture.name(axes, "Placement by lifetimes", y="%")


def _broken(name: str) -> str:
    """A name in several lines, so that neighbours do not run into each other."""
    return re.sub(r"_| (?=in )|\.", "\n", name)


_PANELS: dict[str, Any] = {"disk": _disk, "packed": _packed, "placement": _placement}
