"""Files that grow while a run trains: lines of JSON, and what ``logger=`` names; none that fails ends it.

Loggers write into the run folder and nowhere else: a run of Weights & Biases stays on this machine until
somebody sends it (``wandb sync``), or asks for more by ``WANDB_MODE=online``."""

from __future__ import annotations

import collections
import contextlib
import csv
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...stages.files import reason, refusing, remedy
from ..runtime.report import Report
from .metrics import step_line

if TYPE_CHECKING:
    from ..pipeline import Pipeline

Row = TypeVar("Row")
# Functions that write the numbers of a step by their names, of which None is none, and close.
Logger = tuple[Callable[[int, Mapping[str, Any]], object], Callable[[], object]]
COLUMNS: Sequence[str] = (
    "step", "loss", "seconds", "samples_per_second", "tokens_per_second", "learning_rate", "gradient_norm",
    "bytes_raw", "bytes_sent", "bubble", "peak_bytes",
    "bytes_raw_forward", "bytes_raw_backward", "bytes_sent_forward", "bytes_sent_backward",
    "test_accuracy", "test_loss",
)  # fmt: skip


class JsonLog:
    """A growing file with a JSON object a line, of which ``last`` is the last; without a path, nothing.

    A disk that fills up ends no training: lines wait until they can be written, and ``tell`` is called with a
    sentence when that begins, and at the end if some still wait."""

    def __init__(self, path: Path | None, *, tell: Callable[[str], None] = print, first: int = 0) -> None:
        """Begin at step ``first``: lines of earlier steps stay, later ones are cut off."""
        self._path, self._tell, self._told = path or Path(os.devnull), tell, False
        self._waiting = collections.deque[bytes]()
        with refusing(self._path):
            lines = self._path.read_bytes() if first and self._path.is_file() else b""
            whole = itertools.takewhile(lambda line: line.endswith(b"\n"), lines.splitlines(keepends=True))
            kept = _before(first, whole, lambda line: json.loads(line)["step"])
            self.last: Mapping[str, Any] = json.loads(kept[-1]) if kept else {}
            self._num_lines, self._size = len(kept), sum(map(len, kept))  # of whole lines
            self._last_size = len(kept[-1]) if kept else 0
            self._file = self._path.open("ab", buffering=0)
            if path:
                self._file.truncate(self._size)

    def __enter__(self) -> JsonLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._write()
        lost = f"the last {len(self._waiting)}" if self._waiting else ""
        try:
            self._file.close()
        except OSError as error:  # a disk over the network may say only now that it is full
            lost = lost or f"some ({reason(error)})"
        if lost:
            self._tell(f"{self._path} lacks {lost} of {self._num_lines} lines")

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line at once, so that a killed run keeps its history."""
        self.last, self._num_lines = line, self._num_lines + 1
        self._waiting.append(f"{json.dumps(line, allow_nan=False)}\n".encode())
        self._last_size = len(self._waiting[-1])
        self._write()

    def amend(self, step: int, more: Mapping[str, Any]) -> None:
        """Write the line of ``step`` anew with ``more`` at its end, if it is the last one."""
        if self.last.get("step") != step:
            return
        self._num_lines -= 1
        if self._waiting:
            self._waiting.pop()
        else:
            self._size -= self._last_size
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
        self.append({**self.last, **more})

    def _write(self) -> None:
        try:
            while self._waiting:
                line = self._waiting[0]
                while line:
                    line = line[self._file.write(line) :]
                self._size += len(self._waiting.popleft())
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)  # no half line
            if not self._told:
                refusal = f"{self._path} cannot be written ({reason(error)})"
                self._tell(f"{refusal}; training goes on, {remedy(error)}")
            self._told = True


def _before(first: int, rows: Iterable[Row], step_of: Callable[[Row], int]) -> list[Row]:
    """Rows up to the first that is damaged, or of a step from ``first`` on."""
    kept = []
    for row in rows:
        try:
            if step_of(row) >= first:
                break
        except (ValueError, KeyError, TypeError):
            break
        kept.append(row)
    return kept


@contextlib.contextmanager
def shares_log(
    pipe: Pipeline, path: Path | None, *, tell: Callable[[str], None]
) -> Iterator[Callable[[Report], None]]:
    """``shares.jsonl``: the weights by which replicas take micro-batches, and from which step on.

    A line for the step that a run begins with, and one whenever shares change, of which ``tell`` is told;
    without a path or replicas, nothing. The block has what is called after each step.
    """
    if path is None or max(pipe.plan.replicas) == 1 or pipe.world.is_alone:
        yield lambda report: None
        return
    with JsonLog(path, tell=tell, first=pipe.num_steps) as log:

        def append(report: Report | None = None) -> None:
            shares = [list(own) for own in pipe.plan.shares]
            if shares == log.last.get("shares"):
                return
            log.append({"step": pipe.num_steps, "shares": shares, "cuts": list(pipe.plan.cuts)})
            if report:
                stages = ", ".join(f"stage {stage} {own}" for stage, own in enumerate(shares) if len(own) > 1)
                tell(f"shares of replicas behind step {report.step + 1}: {stages}")

        append()
        yield append


def _table(folder: Path, first: int, options: Mapping[str, Any]) -> Logger:
    """``metrics.csv``: a line a step, and one for each test with the other columns left empty."""
    path, kept = folder / "metrics.csv", []
    if first and path.exists():
        with path.open(newline="", encoding="utf-8") as before:
            whole = itertools.takewhile(lambda row: None not in row.values(), csv.DictReader(before))
            # The test after the last step before is taken again.
            kept = _before(first, whole, lambda row: int(row["step"]) + bool(row["test_loss"]))
    file = path.open("w", newline="", encoding="utf-8", buffering=1)
    rows = csv.DictWriter(file, COLUMNS)
    rows.writeheader()
    rows.writerows(kept)
    return lambda step, numbers: rows.writerow({"step": step, **numbers}), file.close


def _tensorboard(folder: Path, first: int, options: Mapping[str, Any]) -> Logger:
    """Events in ``tensorboard/``, for ``tensorboard --logdir`` of this run or of the folder of all runs."""
    from torch.utils.tensorboard import SummaryWriter  # takes a second

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first or None)

    def write(step: int, numbers: Mapping[str, Any]) -> None:
        for name, number in numbers.items():
            if number is not None:
                writer.add_scalar(name, number, step)

    return write, writer.close


def _weights_and_biases(folder: Path, first: int, options: Mapping[str, Any]) -> Logger:
    """A run in ``wandb/`` with the options of this one; those of a run that goes on share a group."""
    import wandb

    run = wandb.init(
        project=os.environ.get("WANDB_PROJECT", "penstock"),
        name=f"{folder.name} from step {first}" if first else folder.name,
        group=folder.name,
        dir=folder,
        config=dict(options),
        mode=None if "WANDB_MODE" in os.environ else "offline",
        # What this process prints is ours to show, and a person reads it in one place.
        settings=wandb.Settings(console="off", silent=True),
    )

    def write(step: int, numbers: Mapping[str, Any]) -> None:
        run.log({name: number for name, number in numbers.items() if number is not None}, step=step)

    return write, run.finish


LOGGERS = {"csv": _table, "tensorboard": _tensorboard, "wandb": _weights_and_biases}


class Loggers:
    """All that ``logger=`` named, for ``with``; one that fails is told of once and left out from then on."""

    def __init__(
        self, names: Sequence[str], folder: Path, *, first: int, options: Any, tell: Callable[[str], None]
    ) -> None:
        self._tell, self._loggers = tell, dict[str, Logger]()
        for name in names:
            with self._without(name):
                self._loggers[name] = LOGGERS[name](folder, first, options)

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, *_: object) -> None:
        self._each(lambda write, close: close())

    def step(self, report: Report) -> None:
        """Write what a step did."""
        line = step_line(report)
        step = line.pop("step")
        self._each(lambda write, close: write(step, line))

    def test(self, step: int, results: Mapping[str, float]) -> None:
        """Write the results of a test behind ``step`` by their names."""
        numbers = {f"test_{name}": result for name, result in results.items()}
        self._each(lambda write, close: write(step, numbers))

    def _each(self, do: Callable[..., object]) -> None:
        for name, logger in list(self._loggers.items()):
            with self._without(name):
                do(*logger)

    @contextlib.contextmanager
    def _without(self, name: str) -> Iterator[None]:
        """Go on without a logger that fails in the block; other people's code raises anything."""
        try:
            yield
        except Exception as error:
            self._loggers.pop(name, None)
            said = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self._tell(f"logger={name} failed ({said}); training goes on without it")
