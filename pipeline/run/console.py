"""What a person sees: progress while it runs, a table when it ends, one sentence when it cannot.

On a terminal the progress is a bar that redraws itself; anywhere else it is a plain line now and then,
so that a log stays readable."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from ...compression.names import show_codec
from ...stages.units import show_bytes
from . import schedule_table as compare_table
from .metrics import ratio
from .tier_rows import tier_table

if TYPE_CHECKING:
    from ...stages.planner.plan import Plan
    from ..runtime.report import Report
    from .schedule_comparison import Comparison

SECONDS_BETWEEN_LINES = 10.0  # at first; every line of a log doubles it, so that a log stays short
MOST_SECONDS_BETWEEN_LINES = 300.0
WIDTH_OF_A_LOG = WIDTH_OF_RAW_BYTES = 110
MOST_FLOWS = 4  # in the closing lines; summary.json has all
KEY = (
    "bubble: share of the steps after the first in which the rank computed nothing",
    "counted: parameters, gradients, optimizer, versions, saved tensors at their most; resident: the process",
)
_SMOOTHING = 0.1


class Training:
    """The progress of a training run: ``with Training(num_steps) as progress: progress.step(report)``.

    Every rank has one; only the one that is ``shown`` prints.
    """

    def __init__(self, num_steps: int, *, shown: bool = True, console: Console | None = None) -> None:
        self._console = console or screen()
        self._console.quiet = not shown
        self._num_steps, self._before, self._done = num_steps, 0, 0
        self._raw, self._sent, self._seconds = 0, 0, 0.0
        self._pause = SECONDS_BETWEEN_LINES
        self._next_line = time.monotonic()  # the first step gets a line
        self._bar = Progress(
            BarColumn(bar_width=None),  # takes what the rest leaves
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(),
            console=self._console,
            expand=True,
            disable=not (shown and self._console.is_terminal),
        )
        self._task = self._bar.add_task("training", total=num_steps, facts="starting the ranks")

    def __enter__(self) -> Training:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def resume(self, step: int, again: str) -> None:
        """Go on behind ``step`` steps, which are done; ``again``: what to say of those done a second time."""
        self._before = self._done = step
        more = f"; {again}" if again else ""
        self.note(f"goes on behind step {step} of {self._num_steps}, from a checkpoint{more}")

    def step(self, report: Report) -> None:
        """Show one more step."""
        self._done += 1
        self._raw, self._sent = self._raw + report.bytes_raw, self._sent + report.bytes_sent
        first = max(1, self._done - self._before - 1)  # the first step is slow and is forgotten
        weight = max(_SMOOTHING, 1 / first)
        self._seconds += weight * (report.seconds - self._seconds)
        facts = f"loss {report.loss:.4f}  {report.num_samples / self._seconds:.0f} samples/s"
        if self._sent:
            facts += f"  {packed(self._raw, self._sent)}"
        self._bar.update(self._task, completed=self._done, facts=facts)
        if self._bar.disable and self._is_time_for_a_line():
            left = clock(self._seconds * (self._num_steps - self._done))
            self.note(f"step {self._done}/{self._num_steps}  {facts}  ETA {left}")

    def note(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line, highlight=False)

    def _is_time_for_a_line(self) -> bool:
        now = time.monotonic()
        if self._done < self._num_steps and now < self._next_line:
            return False
        self._next_line, self._pause = now + self._pause, min(2 * self._pause, MOST_SECONDS_BETWEEN_LINES)
        return True


def screen(*, width_of_a_log: int = WIDTH_OF_A_LOG) -> Console:
    """Return standard output; where it is no terminal, wide enough for the closing table."""
    return Console(width=None if sys.stdout.isatty() else width_of_a_log)


def begin(plan: Plan, folder: Path, *, console: Console | None = None) -> None:
    """Say what is about to run, and where it leaves its files."""
    _print(console or screen(), f"{short(folder)}: {str(plan).splitlines()[0]}")


def close(summary: Mapping[str, Any], files: Iterable[Path], *, console: Console | None = None) -> None:
    """Print the closing table, the totals, and in one line where the pictures and the trace are."""
    console = console or screen()
    console.print(closing_table(summary, wide=console.width >= WIDTH_OF_RAW_BYTES))
    if table := tier_table(summary):
        console.print(table)
    _print(console, *KEY, *totals(summary), "  ".join(map(short, files)))


def closing_table(summary: Mapping[str, Any], *, wide: bool = True) -> Table:
    """Return one row per stage: how long it computed, what it kept, what it sent each way.

    The stages of a rank share its bubble and its memory, told with the first of them.

    Args: wide: also say how much that was before packing.
    """
    on_gpus = any(stage.get("device_bytes") for stage in summary["stages"])
    wide = wide and not on_gpus  # whose column takes the room
    sent = packed if wide else lambda *both: packed(*both).rpartition("-> ")[2]
    table = Table(box=None, pad_edge=False, collapse_padding=not wide, header_style="bold")
    for name in ("stage", "rank", "compute", "bubble", "counted", "resident"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("activations", "gradients"):
        table.add_column(f"{name} {'raw -> ' * wide}sent", justify="right", no_wrap=True)
    if on_gpus:
        table.add_column("GPU", justify="right", no_wrap=True)
    told: set[int] = set()
    for stage in summary["stages"]:
        first = stage["rank"] not in told
        told.add(stage["rank"])
        table.add_row(
            str(stage["stage"]),
            str(stage["rank"]),
            f"{stage['compute_seconds']:.1f} s",
            f"{stage['bubble']:.0%}" if first else "",
            show_bytes(stage["peak_bytes"]) if stage["peak_bytes"] else "-",
            (show_bytes(stage["resident_bytes"]) if stage["resident_bytes"] else "-") if first else "",
            sent(stage["bytes_raw_forward"], stage["bytes_sent_forward"]),
            sent(stage["bytes_raw_backward"], stage["bytes_sent_backward"]),
            *([show_bytes(stage["device_bytes"])] if on_gpus else []),
        )
    return table


def compared(found: Comparison, *, console: Console | None = None) -> None:
    """Print the schedules side by side, the chosen one marked, and why others were left out."""
    console = console or screen()
    console.print(compare_table.table(found))
    _print(console, *compare_table.notes(found))


def _print(console: Console, *lines: str) -> None:
    """Print lines as they are, however long."""
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def totals(summary: Mapping[str, Any]) -> list[str]:
    """Return the lines below the table."""
    lines = []
    if summary["bytes_sent"]:
        sent = packed(summary["bytes_raw"], summary["bytes_sent"])
        lines.append(f"sent between stages{_lossy(summary['codec'])}: {sent}")
    if summary["bytes_saved_raw"]:
        kept = packed(summary["bytes_saved_raw"], summary["bytes_saved_kept"])
        lines.append(f"saved for the backward: {kept}")
    lines += _codecs(summary)
    lines.append(
        f"{summary['steps']} step{'s' * (summary['steps'] != 1)}, {summary['samples']:,} samples in "
        f"{clock(summary['seconds'])}: {_number(summary['samples_per_second'], '.0f')} samples/s, "
        f"ranks={summary['ranks']} threads={summary['threads']}, last loss {_number(summary['loss'], '.4f')}"
    )
    if "test_accuracy" in summary:
        lines.append(
            f"test accuracy {_number(summary['test_accuracy'], '.2%')}, test loss "
            f"{_number(summary['test_loss'], '.4f')}"
        )
    return lines


def _lossy(codec: str) -> str:
    """What to say of a codec that loses bits; nothing of the others."""
    shown = show_codec(codec)
    return "" if shown == codec else f" by {shown}, so not with the bits of the plain loop"


def _codecs(summary: Mapping[str, Any]) -> list[str]:
    """The codec of the largest values and gradients, and how the choice ran against others."""
    searched = summary["codec"] == "auto"
    if not summary["turns"]:
        soon = searched and summary["bytes_sent"]
        return ["codec=auto: the run ended before a choice was made"] if soon else []
    flows = sorted(summary["flows"], key=lambda flow: -flow["bytes_raw"])[:MOST_FLOWS]
    ways = {"F": "down", "B": "up"}
    shown = [f"{flow['value']} {ways[flow['way']]} {flow['codec']}" for flow in flows]
    turns = [
        turn["name"]
        + (f", +{turn['extra']} in flight:" if turn["extra"] else "")
        + f" {turn['measured']:.3f} s a step (predicted {turn['predicted']:.3f})"
        + ("" if turn["stayed"] else ", switched off")
        for turn in summary["turns"]
    ]
    chosen = [f"codec=auto: {'; '.join(shown)}"] if searched else []
    return [*chosen, f"{'codec' if searched else 'extra_in_flight'}=auto: {'; '.join(turns)}"]


def refuse(error: BaseException) -> None:
    """Print the one sentence of an error, on standard error."""
    warn(str(error))


def warn(sentence: str) -> None:
    """Print a sentence on standard error, in one line."""
    print(f"penstock: {' '.join(sentence.split())}", file=sys.stderr)


def packed(raw: float, sent: float) -> str:
    """Return ``"12.1 MiB -> 6.3 MiB (1.92x)"``, or a dash where nothing was sent."""
    times = ratio(raw, sent)
    return f"{show_bytes(raw)} -> {show_bytes(sent)} ({times:.2f}x)" if times is not None else "-"


def short(path: Path) -> str:
    """Return the path as one would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def clock(seconds: float) -> str:
    """Return ``"1:05"`` or ``"1:00:05"``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _number(value: float | None, form: str) -> str:
    return "no number" if value is None else format(value, form)
