"""Pictures of runs of ``penstock train``, and of a race against torch, for the notebook ``throughput.ipynb``.

A run is compared with others of the same job: another codec, another schedule, another machine."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.compression.errors import ConfigError
from penstock.pipeline.run.metrics import read_lines
from penstock.pipeline.run.run_folder import RunFolder
from penstock.pipeline.run.sweep import COLOURS
from penstock.pipeline.runtime.report import DIRECTIONS
from penstock.stages.plan.plan import Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RACE = Path(__file__).resolve().parents[1] / "bench" / "pipeline.py"
GREY = "#7F7F7F"

TENSORS = {"forward": "activations", "backward": "gradients"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run of ``penstock train``.

    Attributes:
        label: what it is called in pictures.
        steps: the lines of ``metrics.jsonl``. summary: what ``summary.json`` holds.
    """

    label: str
    folder: RunFolder
    steps: list[dict[str, Any]]
    summary: dict[str, Any]
    plan: Plan

    @property
    def samples_per_second(self) -> list[float]:
        """Of every step but the first, which also warms up."""
        rates = [step["samples_per_second"] for step in self.steps]
        return rates[1:] or rates


def run_python(*arguments: str) -> None:
    """Run Python as one types it; its output appears below the cell.

    Raises: subprocess.CalledProcessError: the program refused, for the reason it printed.
    """
    # A notebook asks programs for colours and bars that redraw themselves; lines read better below a cell.
    plain = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "CLICOLOR_FORCE")}
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=plain, check=False, stdout=pipe, stderr=both, text=True)
    print(done.stdout, end="")
    done.check_returncode()


def train(*options: str) -> None:
    """Run ``penstock train``."""
    run_python("-m", "penstock.scripts.command", "train", *options)


def race(*options: str) -> None:
    """Run ``python scripts/bench/pipeline.py``."""
    run_python(str(RACE), *options)


def read_run(folder: str | Path, *, label: str | None = None) -> Run:
    """Read a run folder; its label is its codec unless another is given.

    Raises: ConfigError: the folder holds no finished run. PlanError: its plan is damaged.
    """
    files = RunFolder(path=Path(folder))
    for path in (files.metrics, files.summary):
        if not path.exists():
            raise ConfigError(
                f"{folder} holds no finished run: {path.name} is missing; wait for it, or run it"
            )
    plan = Plan.load(files.plan)
    steps, summary = read_lines(files.metrics), files.read_summary()
    return Run(label=label or plan.codec, folder=files, steps=steps, summary=summary, plan=plan)


def ratios_per_value(runs: Sequence[Run]) -> dict[str, dict[str, float]]:
    """Bytes before / after packing of every value that crossed a cut, and of its gradient, by run."""
    ways = {"F": "activation", "B": "gradient"}
    return {
        run.label: {
            f"{flow['value']} {ways[flow['way']]}": flow["bytes_raw"] / flow["bytes_sent"]
            for flow in sorted(run.summary["flows"], key=lambda flow: flow["way"], reverse=True)
        }
        for run in runs
    }


def draw_speeds(runs: Sequence[Run]) -> Figure:
    """Samples per second: step by step on the left, medians on the right."""
    made, (steps, medians) = _panels(1, 2, size=(11, 3.8), width_ratios=(2, 1))
    for number, run in enumerate(runs):
        at, own = range(len(run.steps) - len(run.samples_per_second), len(run.steps)), COLOURS[number]
        steps.plot(at, run.samples_per_second, color=own, label=run.label, lw=1.4, marker=".", ms=4)
        bar = medians.bar(run.label, statistics.median(run.samples_per_second), color=own, width=0.7)
        medians.bar_label(bar, fmt="%.0f", fontsize=9, padding=2)
    title = "Speed, step by step (the first step is left out)"
    _name(steps, title, x="step", y="samples per second")
    _name(medians, "Median of the steps", y="samples per second")
    steps.legend(frameon=False)
    steps.locator_params(axis="x", integer=True)
    for axes in (steps, medians):
        axes.margins(y=0.15)
        axes.set_ylim(bottom=0)
    return made


def draw_bytes(runs: Sequence[Run]) -> Figure:
    """Bytes that crossed all cuts in a step on average, both ways: before packing, and sent by each run."""
    columns = [("before packing", GREY, "raw", runs[0].summary)]
    columns += [(run.label, COLOURS[number], "sent", run.summary) for number, run in enumerate(runs)]
    heights = [[of[f"bytes_{kind}_{way}"] / of["steps"] for way in DIRECTIONS] for _, _, kind, of in columns]
    most = max(map(max, heights))
    power = next(power for power in (30, 20, 10, 0) if most >= 1 << power or not power)
    unit = {30: "GiB", 20: "MiB", 10: "KiB", 0: "B"}[power]
    sides = {
        label: (own, [height / (1 << power) for height in of_run])
        for (label, own, *_), of_run in zip(columns, heights, strict=True)
    }
    return _bars("Bytes over the cuts in a step", list(TENSORS.values()), sides, y=f"{unit} per step")


def draw_ratios(ratios: Mapping[str, Mapping[str, float]]) -> Figure:
    """Bytes before / after packing of each value, a bar for each codec; below 1 a frame is larger."""
    values = list(next(iter(ratios.values())))
    named = enumerate(ratios.items())
    sides = {codec: (COLOURS[i], [of[value] for value in values]) for i, (codec, of) in named}
    names = [value.replace(" ", "\n") for value in values]
    made = _bars("How far each value shrinks", names, sides, y="bytes before / after packing")
    made.axes[0].axhline(1, color="black", linewidth=0.8)
    return made


def draw_timelines(runs: Sequence[Run]) -> Figure:
    """The last step of every run, one picture below the other."""
    from matplotlib.image import imread

    pictures = [imread(run.folder.timeline) for run in runs]
    heights = [13.0 * made.shape[0] / made.shape[1] + 0.35 for made in pictures]
    made, rows = _panels(len(runs), 1, size=(13.0, sum(heights)), height_ratios=heights)
    for run, drawn, axes in zip(runs, pictures, rows, strict=True):
        axes.imshow(drawn)
        axes.set_title(f"codec {run.label}", loc="left", fontsize=12)
        axes.axis("off")
    return made


def draw_race(results: str | Path) -> Figure:
    """Samples per second of torch's pipeline and ours, by link, from the results of a race."""
    rows = json.loads(Path(results).read_text())["rows"]
    links = list(dict.fromkeys(row["link"] for row in rows))
    sides: dict[str, tuple[str, list[float]]] = {}
    for row in rows:
        depth = f", {row['extra_in_flight']} more in flight" if row["extra_in_flight"] else ""
        label = "torch 1F1B" if row["side"] == "torch" else f"{row['codec']}{depth}"
        own = GREY if row["side"] == "torch" else COLOURS[(len(sides) - 1) % len(COLOURS)]
        sides.setdefault(label, (own, []))[1].append(row["samples_per_second"])
    return _bars("Race against torch, by link", links, sides, y="samples per second (median)")


Sides = Mapping[str, tuple[str, Sequence[float]]]
"""Colour and heights by label."""


def _bars(title: str, groups: Sequence[str], sides: Sides, *, y: str) -> Figure:
    made, (axes,) = _panels(1, 1, size=(max(8, 0.6 * len(groups) * len(sides)), 3.8))
    width = 0.8 / max(1, len(sides))
    for number, (label, (own, heights)) in enumerate(sides.items()):
        places = [group - 0.4 + width * (number + 0.5) for group in range(len(heights))]
        drawn = axes.bar(places, heights, 0.92 * width, color=own, label=label)
        axes.bar_label(drawn, fmt="%.2f", fontsize=8, padding=2)
    axes.set_xticks(range(len(groups)), groups)
    axes.margins(y=0.15)
    axes.legend(frameon=False, fontsize=8.5, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _name(axes, title, y=y)
    return made


def _panels(
    rows: int, columns: int, *, size: tuple[float, float], **options: Any
) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    made = Figure(figsize=size, layout="constrained")
    return made, list(made.subplots(rows, columns, squeeze=False, **options).flat)


def _name(axes: Axes, title: str = "", *, x: str = "", y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
