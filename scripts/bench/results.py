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
from .pipeline_picture import COLOURS, GREY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
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
    plain = {
        name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "CLICOLOR_FORCE")
    }
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, env=plain, check=False, **pipes)
    print(done.stdout, end="")
    done.check_returncode()


def read_run(folder: str | Path, *, label: str | None = None) -> Run:
    """Read a run folder; its label is its codec unless another is given.

    Raises: ConfigError: the folder holds no finished run. PlanError: its plan is damaged.
    """
    files = RunFolder(path=Path(folder))
    try:
        steps, summary = read_lines(files.metrics), files.read_summary()
    except FileNotFoundError as error:
        name = Path(str(error.filename)).name
        raise ConfigError(
            f"{folder} holds no finished run: {name} is missing; wait for it, or run it"
        ) from error
    plan = Plan.load(files.plan)
    return Run(
        label=label or plan.codec,
        folder=files,
        steps=steps,
        summary=summary,
        plan=plan,
    )


def read_bench(folder: str | Path) -> dict[str, Any]:
    """Read what ``penstock bench`` left in a folder.

    Raises: ConfigError: there is no ``results.json``.
    """
    try:
        return json.loads(Path(folder, "results.json").read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} holds no results.json; name the folder of a penstock bench") from error


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
    from matplotlib.ticker import MaxNLocator

    made, (steps, medians) = _panels(2, size=(11, 3.8), widths=(2, 1))
    for number, run in enumerate(runs):
        first = len(run.steps) - len(run.samples_per_second)
        at = range(first, len(run.steps))
        steps.plot(
            at, run.samples_per_second, color=_colour(number), label=run.label, lw=1.4, marker=".", ms=4
        )
        median = statistics.median(run.samples_per_second)
        bar = medians.bar(run.label, median, color=_colour(number), width=0.7)
        medians.bar_label(bar, fmt="%.0f", fontsize=9, padding=2)
    steps.legend(frameon=False)
    _name(steps, "Speed, step by step (the first step is left out)", x="step", y="samples per second")
    _name(medians, "Median of the steps", y="samples per second")
    steps.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (steps, medians):
        axes.margins(y=0.15)
        axes.set_ylim(bottom=0)
    return made


def draw_bytes(runs: Sequence[Run]) -> Figure:
    """What crossed all cuts in a step on average: before packing, and sent by each run, both directions."""
    made, (axes,) = _panels(1, size=(8, 3.8))
    first = runs[0].summary
    bars = [("before packing", GREY, [first[f"bytes_raw_{way}"] / first["steps"] for way in DIRECTIONS])]
    for number, run in enumerate(runs):
        sent = [run.summary[f"bytes_sent_{way}"] / run.summary["steps"] for way in DIRECTIONS]
        bars.append((run.label, _colour(number), sent))
    unit, name = _unit(max(max(heights) for _, _, heights in bars))
    scaled = [(label, colour, [height / unit for height in heights]) for label, colour, heights in bars]
    _groups(axes, [TENSORS[way] for way in DIRECTIONS], scaled, form="%.2f")
    _name(axes, "Bytes over the cuts in a step", y=f"{name} per step")
    return made


def draw_ratios(ratios: Mapping[str, Mapping[str, float]]) -> Figure:
    """Bytes before / after packing of each value, a bar for each codec; below 1 a frame is larger."""
    values = list(next(iter(ratios.values())))
    made, (axes,) = _panels(1, size=(max(8, 1.2 * len(values) * len(ratios) / 2), 3.8))
    bars = [(codec, _colour(i), [of[v] for v in values]) for i, (codec, of) in enumerate(ratios.items())]
    _groups(axes, [value.replace(" ", "\n") for value in values], bars, form="%.2f")
    axes.axhline(1, color="black", linewidth=0.8)
    _name(axes, "How far each value shrinks", y="bytes before / after packing")
    return made


def draw_timelines(runs: Sequence[Run]) -> Figure:
    """The last step of every run, one picture below the other."""
    from matplotlib.image import imread

    pictures = [imread(run.folder.timeline) for run in runs]
    width = 13.0
    heights = [width * picture.shape[0] / picture.shape[1] + 0.35 for picture in pictures]
    made, all_axes = _panels(len(runs), size=(width, sum(heights)), heights=heights)
    for run, picture, axes in zip(runs, pictures, all_axes, strict=True):
        axes.imshow(picture)
        axes.set_title(f"codec {run.label}", loc="left", fontsize=12)
        axes.axis("off")
    return made


def _panels(
    count: int, *, size: tuple[float, float], widths: Sequence[float] = (), heights: Sequence[float] = ()
) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` axes, in a row, or below each other where ``heights`` are given."""
    from matplotlib.figure import Figure

    made = Figure(figsize=size, layout="constrained")
    if heights:
        made_axes = made.subplots(count, 1, squeeze=False, height_ratios=heights)
    else:
        made_axes = made.subplots(1, count, squeeze=False, width_ratios=widths or None)
    return made, list(made_axes.flat)


def _groups(
    axes: Axes, names: Sequence[str], bars: Sequence[tuple[str, str, Sequence[float]]], *, form: str
) -> None:
    """A group of bars over each name; ``bars``: label, colour and a height for each name."""
    width = 0.8 / len(bars)
    for number, (label, colour, heights) in enumerate(bars):
        places = [group - 0.4 + width * (number + 0.5) for group in range(len(names))]
        made = axes.bar(places, heights, 0.92 * width, color=colour, label=label)
        axes.bar_label(made, fmt=form, fontsize=8, padding=2)
    axes.set_xticks(range(len(names)), names)
    axes.margins(y=0.15)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _name(axes: Axes, title: str, *, x: str = "", y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _unit(num_bytes: float) -> tuple[int, str]:
    """The binary unit that suits a number of bytes, and its name."""
    powers = enumerate(("B", "KiB", "MiB", "GiB"))
    return next(
        (1024**power, name) for power, name in [*powers][::-1] if num_bytes >= 1024**power or not power
    )
