"""Output for a person: progress while it runs, a table when it ends, one sentence when it cannot.

On a terminal the progress is a bar that redraws itself; anywhere else it is a plain line now and then,
so that a log stays readable."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.spinner import Spinner
from rich.table import Column

from ...stages.files import reason
from .tables import (
    KEY,
    clock,
    closing_table,
    notes,
    packed,
    prediction_table,
    schedule_table,
    tier_table,
    totals,
)

if TYPE_CHECKING:
    from ...stages.plan.plan import Plan
    from ..runtime.report import Report
    from .schedule_comparison import Comparison

SECONDS_BETWEEN_LINES = 10.0  # at first; every line of a log doubles it, so that a log stays short
MOST_SECONDS_BETWEEN_LINES = 300.0
WIDTH_OF_A_LOG = WIDTH_OF_RAW_BYTES = 110
_SMOOTHING = 0.1


class Training:
    """The progress of a training run, for ``with``; of the ranks, the one that is ``shown`` prints."""

    def __init__(self, num_steps: int, *, shown: bool = True, console: Console | None = None) -> None:
        self._console = console or screen()
        self._console.quiet = not shown
        self._num_steps, self._before, self._done = num_steps, 0, 0
        self._raw, self._sent, self._seconds = 0, 0, 0.0
        self._pause, self._next_line = SECONDS_BETWEEN_LINES, time.monotonic()  # the first step gets a line
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
        self.note(f"goes on behind step {step} of {self._num_steps}, from a checkpoint{again}")

    def step(self, report: Report) -> None:
        """Show one more step."""
        self._done += 1
        self._raw, self._sent = self._raw + report.bytes_raw, self._sent + report.bytes_sent
        number = max(1, self._done - self._before - 1)  # the first step is slow and is forgotten
        weight = max(_SMOOTHING, 1 / number)
        self._seconds += weight * (report.seconds - self._seconds)
        facts = f"loss {report.loss:.4f}  {report.num_samples / self._seconds:.0f} samples/s"
        if report.num_tokens:
            facts += f"  {report.num_tokens / self._seconds:.0f} tokens/s"
        if self._sent:
            facts += f"  {packed(self._raw, self._sent)}"
        self._bar.update(self._task, completed=self._done, facts=facts)
        now = time.monotonic()
        if self._bar.disable and (self._done >= self._num_steps or now >= self._next_line):
            self._next_line = now + self._pause
            self._pause = min(2 * self._pause, MOST_SECONDS_BETWEEN_LINES)
            left = clock(self._seconds * (self._num_steps - self._done))
            self.note(f"step {self._done}/{self._num_steps}  {facts}  ETA {left}")

    def note(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line, highlight=False, markup=False)


class _Output:
    """Standard output that may end, as a pipe or a full disk does: the rest is dropped, with one warning."""

    def write(self, text: str) -> int:
        try:
            return sys.stdout.write(text)
        except OSError as error:
            return self._end(error)

    def flush(self) -> None:
        try:
            sys.stdout.flush()
        except OSError as error:
            self._end(error)

    def _end(self, error: OSError) -> int:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # what is still in its buffer would fail again at the end
        os.close(nowhere)
        warn(f"standard output cannot be written any more ({reason(error)}); the run goes on without it")
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)


def screen(*, width_of_a_log: int = WIDTH_OF_A_LOG) -> Console:
    """Return standard output; where it is no terminal, wide enough for the closing table."""
    return Console(file=cast("IO[str]", _Output()), width=None if sys.stdout.isatty() else width_of_a_log)


@contextlib.contextmanager
def planning() -> Iterator[None]:
    """Show on a terminal that something goes on while the block runs."""
    how: Any = {"transient": True, "redirect_stdout": False, "redirect_stderr": False}
    spinner = Spinner("dots", "recording and measuring the layers of the model")
    with Live(spinner, console=Console(stderr=True), **how):
        yield


def begin(plan: Plan, folder: Path) -> None:
    """Say what is about to run, and where it leaves its files."""
    _print(screen(), f"{short(folder)}: {str(plan).splitlines()[0]}")


def close(summary: Mapping[str, Any], files: Iterable[Path], *, console: Console | None = None) -> None:
    """Print the closing table, the totals, and in one line where the pictures and the trace are."""
    console = console or screen()
    wide = console.width >= WIDTH_OF_RAW_BYTES
    console.print(closing_table(summary, wide=wide))
    for table in (tier_table(summary), prediction_table(summary, wide=wide)):
        if table is not None:
            console.print(table)
    _print(console, *KEY, *totals(summary), "  ".join(map(short, files)))


def compared(found: Comparison) -> None:
    """Print the schedules side by side, the chosen one marked, and why others were left out."""
    console = screen()
    console.print(schedule_table(found))
    _print(console, *notes(found))


def _print(console: Console, *lines: str) -> None:
    """Print lines without wrapping."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def warn(sentence: str) -> None:
    """Print a sentence on standard error, in one line, if that can be written."""
    with contextlib.suppress(OSError):
        print(f"penstock: {' '.join(sentence.split())}", file=sys.stderr)


def short(path: Path) -> str:
    """Return the path as one would type it here."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
