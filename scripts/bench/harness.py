"""What all benches share: contestants that take turns, a table, and ``results.json`` from begin to end.

A number is worth what stands beside it: its neighbour in the same run, and on which machine, with which
versions, by which command and when it was taken."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from rich.table import Table

from ... import __version__
from ...pipeline.run import console
from ...pipeline.run.run_folder import RunFolder
from ...stages.files import save_json, save_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Key = TypeVar("Key")
Taken = TypeVar("Taken")
Clock = Callable[[], float]
Row = Mapping[str, Any]
SPEEDS = ("samples_per_second", "samples_per_second_of_runs")
"""The fields that ``speeds`` gives: the median, and all runs."""

WIDTH = 150


def alternate(
    sides: Mapping[Key, Callable[[], Taken]],
    repeats: int,
    *,
    seconds: float = inf,
    clock: Clock = time.perf_counter,
) -> dict[Key, list[Taken]]:
    """Run every side in turn; return what the runs of each gave: entries of one index were neighbours.

    Args: repeats: runs of each; fewer, but one at least, where they would take longer than ``seconds``.
    """
    taken: dict[Key, list[Taken]] = {name: [] for name in sides}
    began = clock()
    for number in range(repeats):
        if number and clock() - began >= seconds:
            break
        for name, run in sides.items():
            taken[name].append(run())
    return taken


def timed(call: Callable[[], object], times: int, *, clock: Clock = time.perf_counter) -> Callable[[], float]:
    """A run of ``times`` calls; it returns the seconds of one."""

    def run() -> float:
        began = clock()
        for _ in range(times):
            call()
        return (clock() - began) / times

    return run


def medians(taken: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """The median run of each side."""
    return {name: statistics.median(runs) for name, runs in taken.items()}


def speeds(seconds: Sequence[float], batch_size: int, prefix: str = "") -> dict[str, Any]:
    """What a row says of runs that took so many seconds a step."""
    found = batch_size / statistics.median(seconds), [batch_size / one for one in seconds]
    return {f"{prefix}{name}": value for name, value in zip(SPEEDS, found, strict=True)}


def compared(ours: Sequence[float], theirs: Sequence[float], batch_size: int) -> dict[str, Any]:
    """What a row says of our runs, and of how many times as fast they were as the rival's beside them."""
    pairs = [rival / own for rival, own in zip(theirs, ours, strict=True)]
    return speeds(ours, batch_size) | {"speedup": statistics.median(pairs), "speedup_of_pairs": pairs}


def table(*groups: Sequence[Mapping[str, str]], left: Iterable[str], **options: Any) -> Table:
    """Return a table of ``groups`` of rows, ruled off from each other.

    Args: groups: rows as heading and words; a cell of which a row says nothing stays empty.
          left: headings of columns that begin on the left; options: of ``rich.table.Table``.
    """
    shown = Table(**options)
    headings = list(dict.fromkeys(heading for rows in groups for row in rows for heading in row))
    for heading in headings:
        shown.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for rows in groups:
        for row in rows:
            shown.add_row(*(row.get(heading, "") for heading in headings))
        shown.add_section()
    return shown


def spread(values: Sequence[float]) -> str:
    """The least and the most of ``values``."""
    return f"{min(values):.2f}-{max(values):.2f}"


class Record:
    """``results.json`` while a bench fills it, and what the bench tells a person."""

    def __init__(self, topic: str, typed: Sequence[str], folder: RunFolder) -> None:
        self.folder, self.command, self.content = folder, ["penstock", "bench", topic, *typed], {}
        self.screen = console.screen(width_of_a_log=WIDTH)

    def begin(self, **facts: Any) -> None:
        """Take over the folder, now that nothing is refused any more, and note what is measured on."""
        self.folder.begin(console.warn)
        self.content: dict[str, Any] = circumstances(self.command) | facts

    def keep(self, **found: Any) -> None:
        """Write what was found: lists go behind those of the same name."""
        for name, value in found.items():
            before = self.content.get(name)
            self.content[name] = before + value if isinstance(before, list) else value
        save_json(self.folder.results, self.content)

    def say(self, *lines: str) -> None:
        """Print lines that a log can be searched for, however narrow it is."""
        for line in lines:
            self.screen.print(line, highlight=False, soft_wrap=True)

    def end(self, figure: Callable[[Mapping[str, Any]], Figure]) -> None:
        """Write the last of ``results.json`` and its picture, and say where they are."""
        picture = self.folder.results.with_suffix(".png")
        self.keep(load_after=os.getloadavg())
        save_picture(picture, figure(self.content))
        print(*map(console.short, (self.folder.results, picture)), sep="\n")


def circumstances(command: Sequence[str]) -> dict[str, Any]:
    """Return what a number needs beside it: command, hardware, versions, date."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpus = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cpu = next(cpus, platform.processor() or "unknown")
    python = platform.python_version()
    return {
        "command": shlex.join(command),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": {"cpu": cpu, "cores": os.cpu_count(), "machine": platform.machine()},
        "versions": {"penstock": __version__, "torch": str(torch.__version__), "python": python},
        "system": f"{platform.system()} {platform.release()}",
        "load_before": os.getloadavg(),
    }
