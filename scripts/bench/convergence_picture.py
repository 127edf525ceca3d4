"""Accuracy over samples: a panel per data set, a line per policy, the range of its seeds around it.

Each line has its name at its end: five colours in a legend would send the eye back and forth."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...stages.files import save_picture
from .pipeline_picture import COLOURS, GREY
from .policies import POLICIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_APART = 0.055  # of the height of a panel: what two labels need


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw ``results.json`` into a PNG."""
    save_picture(path, figure(results))


def figure(results: Mapping[str, Any]) -> Figure:
    """The picture as a matplotlib figure."""
    from matplotlib.figure import Figure

    sets = list(dict.fromkeys(run["set"] for run in results["runs"]))
    made = Figure(figsize=(7.5 * max(1, len(sets)), 5.0), layout="constrained")
    panels = made.subplots(1, max(1, len(sets)), squeeze=False)[0]
    for axes, name in zip(panels, sets, strict=False):
        _panel(axes, curves([run for run in results["runs"] if run["set"] == name]))
        axes.set_title(f"{results['job']['model']} on {name}", loc="left", fontsize=11, fontweight="bold")
    return made


def curves(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return by policy: ``samples``, and of the accuracies of its seeds ``mean``, ``least`` and ``most``."""
    found = {}
    for policy in (name for name in POLICIES if any(run["policy"] == name for run in runs)):
        of_seeds = [run for run in runs if run["policy"] == policy]
        columns = list(zip(*(run["accuracy"] for run in of_seeds), strict=True))
        found[policy] = {
            "samples": list(of_seeds[0]["samples"]),
            "mean": [statistics.mean(column) for column in columns],
            "least": [min(column) for column in columns],
            "most": [max(column) for column in columns],
        }
    return found


def _panel(axes: Axes, found: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    for policy, curve in found.items():
        colour = _colour(policy)
        percent = {name: [100 * share for share in curve[name]] for name in ("mean", "least", "most")}
        axes.plot(curve["samples"], percent["mean"], color=colour, linewidth=1.8, marker=".", label=policy)
        axes.fill_between(
            curve["samples"], percent["least"], percent["most"], color=colour, alpha=0.15, linewidth=0
        )
    _labels(axes, {policy: 100 * curve["mean"][-1] for policy, curve in found.items()})
    axes.set_xlim(left=0)
    axes.set_xlabel("training samples seen")
    axes.set_ylabel("test accuracy, %: mean and range over seeds")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E4E7EB", linewidth=0.8)


def _labels(axes: Axes, ends: Mapping[str, float]) -> None:
    """Write each policy beside the end of its line, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    places: dict[str, float] = {}
    for policy, value in sorted(ends.items(), key=lambda item: item[1]):
        beneath = max(places.values(), default=-1.0)
        places[policy] = max((value - low) / (high - low), beneath + _APART)
    above = 1.0 + _APART
    for policy in reversed(places):  # and down again where they would leave the panel
        above = places[policy] = min(places[policy], above - _APART)
    for policy, at in places.items():
        axes.annotate(
            f"{POLICIES[policy].label} {ends[policy]:.1f}",
            (1.01, at),
            xycoords="axes fraction",
            color=_colour(policy),
            fontsize=9,
            va="center",
        )


def _colour(policy: str) -> str:
    return GREY if policy == "synchronous" else COLOURS[list(POLICIES).index(policy) - 1]
