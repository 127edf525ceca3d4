"""``penstock bench cache``: how often several jobs hit in one cache of samples, and what that saves them.

Each part has a file with ``bench(config, record)``, which keeps its rows under names of its own; who draws
them stands in a table here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...conf.bench_cache import BenchCacheConfig
from . import cache_hit, cache_jobs, cache_loaders, cache_real, cache_simulated, picture
from .harness import SPEEDS, Record
from .picture import Bars, colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS: dict[str, Callable[[BenchCacheConfig, Record], None]] = {
    "simulated": cache_simulated.bench,
    "real": cache_real.bench,
    "hit": cache_hit.bench,
    "loaders": cache_loaders.bench,
    "jobs": cache_jobs.bench,
}
"""What is measured, by the name of the part."""


def bench(config: BenchCacheConfig, record: Record) -> None:
    """Measure the parts that are asked for, one after another."""
    facts = ("num_samples", "batch_size", "epochs", "sample_bytes", "rate", "latency", "lookahead", "seed")
    record.begin(job={name: getattr(config, name) for name in facts})
    for part in config.parts:
        PARTS[part](config, record)


def figure(results: Mapping[str, Any]) -> Figure:
    """A panel for hit rates by data, with the optimum, and one for what they save."""
    there = [(rows, draw) for name, draw in _PANELS for rows in _grouped(results.get(name) or ())]
    there += [([results[name]], draw) for name, draw in _SINGLE if results.get(name)]
    made, panels = picture.panels(len(there), size=(11.0, 3.4 * max(1, len(there))), columns=1)
    for axes, (rows, draw) in zip(panels[: len(there)], there, strict=True):
        draw(axes, rows)
    return made


def _grouped(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The rows of each kind of data, of the most jobs."""
    most = max((row["jobs"] for row in rows), default=0)
    kinds = dict.fromkeys(row["data"] for row in rows)
    return [[row for row in rows if (row["data"], row["jobs"]) == (kind, most)] for kind in kinds]


def _titled(rows: Sequence[Mapping[str, Any]]) -> str:
    own = "each with data of its own" if rows[0]["data"] == "own" else "on one data set"
    return f"{rows[0]['jobs']} jobs, {own}"


def _sides(
    rows: Sequence[Mapping[str, Any]], value: str, skip: Sequence[str] = ()
) -> tuple[list[str], list[Bars]]:
    shares = list(dict.fromkeys(row["share"] for row in rows))
    names = [name for name in dict.fromkeys(row["policy"] for row in rows) if name not in skip]
    found = {(row["policy"], row["share"]): row[value] for row in reversed(rows)}  # the first of each counts
    sides = [
        Bars(name, colour(number), [found.get((name, share)) for share in shares])
        for number, name in enumerate(names)
    ]
    return [f"cache of {share:.0%}" for share in shares], sides


def _hits(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    # What hits alike is left out of the picture; the table has all.
    groups, sides = _sides(rows, "hit_rate", skip=("gain_last_0", "next_use_told"))
    best = {row["share"]: row["optimum"] for row in rows}
    sides.append(Bars("offline optimum\n(Belady)", picture.GREY, list(best.values())))
    picture.bars(axes, groups, sides, form="%.3f")
    picture.name(axes, f"Hits from the cache: {_titled(rows)}", y="share of uses")


def _saved(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    groups, sides = _sides(rows, "speedup", skip=("none", "gain_last_0", "next_use_told"))
    picture.bars(axes, groups, sides, form="%.2f")
    axes.axhline(1.0, color=picture.GREY, linewidth=0.8)
    picture.name(axes, f"Storage too slow for all: {_titled(rows)}", y="times as fast as no cache")


def _real_hits(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    rows = [row for row in rows if "simulated" in row and row["policy"] != "none"]
    told = {(row["policy"], row["share"]): row["simulated"]["hit_rate"] for row in rows}
    shares = list(dict.fromkeys(row["share"] for row in rows))
    names = list(dict.fromkeys(row["policy"] for row in rows))
    found = {(row["policy"], row["share"]): row["hit_rate"] for row in rows}
    groups = [f"{name}\n{share:.0%}" for share in shares for name in names]
    places = [(name, share) for share in shares for name in names]
    sides = [
        Bars("processes", colour(0), [found.get(place) for place in places]),
        Bars("simulated", picture.GREY, [told.get(place) for place in places]),
    ]
    picture.bars(axes, groups, sides, form="%.3f")
    picture.name(axes, f"Hits of processes: {_titled(rows)}", y="share of uses")


def _real_saved(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    groups, sides = _sides(rows, "speedup", skip=("none", "page cache"))
    picture.bars(axes, groups, sides, form="%.2f")
    axes.axhline(1.0, color=picture.GREY, linewidth=0.8)
    picture.name(axes, f"Processes behind a slow store: {_titled(rows)}", y="times as fast as no cache")


def _hit(axes: Axes, found: Sequence[Any]) -> None:
    taken = found[0]["microseconds"]
    runs = [found[0]["runs"][name] for name in taken]
    picture.bars(axes, list(taken), [Bars("", colour(0), list(taken.values()), runs)], form="%.1f")
    picture.name(axes, f"A sample of {found[0]['sample_bytes']} bytes", y="microseconds (median)")


def _loaders(axes: Axes, found: Sequence[Any]) -> None:
    rows = found[0]["rows"]
    heights, runs = ([row[name] for row in rows] for name in SPEEDS)
    picture.bars(axes, [row["side"] for row in rows], [Bars("", colour(0), heights, runs)], form="%.0f")
    picture.name(axes, "resnet18 on a folder of JPEGs", y=picture.SPEED)


def _jobs(axes: Axes, found: Sequence[Any]) -> None:
    rows = found[0]
    taken = {side: [row[side]["makespan"] for row in rows] for side in ("without", "with")}
    sides = [
        Bars(f"{side} cache=shared", colour(number), list(map(statistics.median, runs)), runs)
        for number, (side, runs) in enumerate(taken.items())
    ]
    picture.bars(axes, [f"cache of {row['share']:.0%}" for row in rows], sides, form="%.1f")
    picture.name(axes, "Two penstock train on one data set behind a slow store", y="seconds of both")


_SINGLE = (("hit", _hit), ("loaders", _loaders), ("jobs", _jobs))
"""The same for those that have one panel each."""

_PANELS: tuple[tuple[str, Callable[[Axes, Sequence[Mapping[str, Any]]], None]], ...] = (
    ("simulated", _hits),
    ("waiting", _saved),
    ("real", _real_hits),
    ("real", _real_saved),
)
"""By the name of the rows in ``results.json``: what draws them."""
