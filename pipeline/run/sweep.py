"""The end of ``--multirun``: a row and a line of a picture for each run that trained."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...stages.files import save_picture
from . import console
from .metrics import read_lines
from .run_folder import RunFolder
from .tables import table

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")  # Okabe and Ito


def close(folder: Path, runs: Mapping[Path, Sequence[str]]) -> None:
    """Print a table of the finished ``runs``, each by its folder and its options that not all have, and draw
    ``sweep.png``; of a single run nothing."""
    finished = [run for run in (RunFolder(path=path) for path in runs) if run.summary.is_file()]
    if len(finished) < 2:
        return
    names = dict(zip(finished, _options_that_differ([runs[run.path] for run in finished]), strict=True))
    summaries = {run: run.read_summary() for run in finished}
    rows = [[run.path.name, names[run], *_row(summary)] for run, summary in summaries.items()]
    rows += [
        [path.name, "did not finish", *5 * "-"] for path in runs if RunFolder(path=path) not in summaries
    ]
    heads = ("run", "options", "samples/s", "bubble", "packed", "last loss", "test accuracy")
    console.screen().print(table(heads, rows, left=heads[:2]))
    picture = folder / "sweep.png"
    _draw([(names[run], summary, read_lines(run.metrics)) for run, summary in summaries.items()], picture)
    print(console.short(picture))


def _options_that_differ(typed: Sequence[Sequence[str]]) -> list[str]:
    """Return for each run the options that not all runs have."""
    everywhere = set(typed[0]).intersection(*typed)
    return [" ".join(one.lstrip("+") for one in options if one not in everywhere) for options in typed]


def _row(summary: Mapping[str, Any]) -> list[str]:
    accuracy, loss, speed = summary.get("test_accuracy"), summary["loss"], summary["samples_per_second"]
    return [
        f"{speed:,.0f}" if speed else "-",
        f"{summary['bubble']:.0%}",
        f"{summary['ratio']:.2f}x" if summary["ratio"] else "-",
        "-" if loss is None else f"{loss:.4f}",
        "-" if accuracy is None else f"{accuracy:.2%}",
    ]


def _draw(runs: Sequence[tuple[str, Mapping[str, Any], Sequence[Mapping[str, Any]]]], path: Path) -> None:
    """Draw samples per second of each run as bars, and the loss of each by step."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(13, max(4.0, 1.2 + 0.35 * len(runs))), layout="constrained")
    speeds, losses = picture.subplots(1, 2)
    for (name, summary, lines), colour in zip(runs, itertools.cycle(COLOURS), strict=False):
        bar = speeds.barh(name, summary["samples_per_second"] or 0, color=colour)
        speeds.bar_label(bar, fmt="%.0f", padding=3)
        losses.plot([one["step"] for one in lines], [one["loss"] for one in lines], color=colour, label=name)
    speeds.invert_yaxis()
    speeds.margins(x=0.12)
    speeds.set_xlabel("samples per second")
    losses.set_xlabel("step")
    losses.set_ylabel("loss")
    losses.legend(frameon=False, fontsize=8)
    for axes in (speeds, losses):
        axes.spines[["top", "right"]].set_visible(False)
    save_picture(path, picture)
