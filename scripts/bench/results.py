"""What run folders hold, drawn for comparison; the notebook ``throughput.ipynb`` shows it.

A run is compared with its siblings: the same job with another codec, another schedule, another machine."""

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

from ...compression.errors import ConfigError
from ...pipeline.run.metrics import DIRECTIONS, read_lines
from ...pipeline.run.run_folder import RunFolder
from ...stages.planner.plan import Plan
from . import picture
from .picture import GREY, Bars, colour

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def penstock(*arguments: str) -> None:
    """Run a command of Penstock as one types it; its output appears below the cell.

    Raises: subprocess.CalledProcessError: it refused, for the reason it printed.
    """
    command = [sys.executable, "-m", "penstock.scripts.command", *arguments]
    # A notebook asks programs for colours and bars that redraw themselves; lines read better below a cell.
    plain = {key: value for key, value in os.environ.items() if key not in ("FORCE_COLOR", "CLICOLOR_FORCE")}
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(command, env=plain, check=False, stdout=pipe, stderr=both, text=True)
    print(done.stdout, end="")
    done.check_returncode()


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


def read_bench(folder: str | Path) -> dict[str, Any]:
    """Read what ``penstock bench`` left in a folder.

    Raises: ConfigError: there is no ``results.json``.
    """
    file = Path(folder, "results.json")
    if not file.exists():
        raise ConfigError(f"{folder} holds no results.json; name the folder of a penstock bench")
    return json.loads(file.read_text())


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
    made, (steps, medians) = picture.panels(2, size=(11, 3.8), width_ratios=(2, 1))
    for number, run in enumerate(runs):
        at, own = range(len(run.steps) - len(run.samples_per_second), len(run.steps)), colour(number)
        steps.plot(at, run.samples_per_second, color=own, label=run.label, lw=1.4, marker=".", ms=4)
        bar = medians.bar(run.label, statistics.median(run.samples_per_second), color=own, width=0.7)
        medians.bar_label(bar, fmt="%.0f", fontsize=9, padding=2)
    title = "Speed, step by step (the first step is left out)"
    picture.name(steps, title, x="step", y="samples per second")
    picture.name(medians, "Median of the steps", y="samples per second")
    steps.legend(frameon=False)
    steps.locator_params(axis="x", integer=True)
    for axes in (steps, medians):
        axes.margins(y=0.15)
        axes.set_ylim(bottom=0)
    return made


def draw_bytes(runs: Sequence[Run]) -> Figure:
    """What crossed all cuts in a step on average: before packing, and sent by each run, both directions."""
    columns = [("before packing", GREY, "raw", runs[0].summary)]
    columns += [(run.label, colour(number), "sent", run.summary) for number, run in enumerate(runs)]
    heights = [[of[f"bytes_{kind}_{way}"] / of["steps"] for way in DIRECTIONS] for _, _, kind, of in columns]
    most = max(map(max, heights))
    power = next(power for power in (30, 20, 10, 0) if most >= 1 << power or not power)
    unit = {30: "GiB", 20: "MiB", 10: "KiB", 0: "B"}[power]
    sides = [
        Bars(label, own, [height / (1 << power) for height in of_run])
        for (label, own, *_), of_run in zip(columns, heights, strict=True)
    ]
    return _bars("Bytes over the cuts in a step", list(TENSORS.values()), sides, y=f"{unit} per step")


def draw_ratios(ratios: Mapping[str, Mapping[str, float]]) -> Figure:
    """Bytes before / after packing of each value, a bar for each codec; below 1 a frame is larger."""
    values = list(next(iter(ratios.values())))
    sides = [Bars(codec, colour(i), [of[v] for v in values]) for i, (codec, of) in enumerate(ratios.items())]
    names = [value.replace(" ", "\n") for value in values]
    made = _bars("How far each value shrinks", names, sides, y="bytes before / after packing")
    made.axes[0].axhline(1, color="black", linewidth=0.8)
    return made


def draw_timelines(runs: Sequence[Run]) -> Figure:
    """The last step of every run, one picture below the other."""
    from matplotlib.image import imread

    pictures = [imread(run.folder.timeline) for run in runs]
    heights = [13.0 * made.shape[0] / made.shape[1] + 0.35 for made in pictures]
    made, rows = picture.panels(len(runs), size=(13.0, sum(heights)), columns=1, height_ratios=heights)
    for run, drawn, axes in zip(runs, pictures, rows, strict=True):
        axes.imshow(drawn)
        axes.set_title(f"codec {run.label}", loc="left", fontsize=12)
        axes.axis("off")
    return made


def _bars(title: str, names: Sequence[str], sides: Sequence[Bars], *, y: str) -> Figure:
    made, (axes,) = picture.panels(1, size=(max(8, 0.6 * len(names) * len(sides)), 3.8))
    picture.bars(axes, names, sides, form="%.2f")
    picture.name(axes, title, y=y)
    return made
