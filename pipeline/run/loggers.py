"""The steps of a run where people look at them: a table, TensorBoard, Weights & Biases (``logger=``).

Each writes into the run folder and nowhere else: a run of Weights & Biases stays on this machine until
somebody sends it (``wandb sync``), or asks for more by ``WANDB_MODE=online``. What fails here ends no
training."""

from __future__ import annotations

import contextlib
import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...stages.files import reason
from ..runtime.report import Report
from .metrics import step_line

COLUMNS: Sequence[str] = (
    "step", "loss", "seconds", "samples_per_second", "bytes_raw", "bytes_sent", "bubble", "peak_bytes",
    "bytes_raw_forward", "bytes_raw_backward", "bytes_sent_forward", "bytes_sent_backward",
    "test_accuracy", "test_loss",
)  # fmt: skip


class Logger(Protocol):
    """Writes numbers by their names."""

    def write(self, step: int, numbers: Mapping[str, float | None]) -> None:
        """Write what belongs to ``step``; None is a number that is none."""
        ...

    def close(self) -> None:
        """Write what still waits."""
        ...


class _Table:
    """``metrics.csv``: a line a step, and one for each test with the other columns left empty."""

    def __init__(self, folder: Path, *, first: int, options: Mapping[str, Any]) -> None:
        """Begin at step ``first``: lines of earlier steps stay, later ones are cut off."""
        path = folder / "metrics.csv"
        kept = _rows_before(first, path) if first and path.exists() else []
        self._file = path.open("w", newline="", encoding="utf-8", buffering=1)
        self._rows = csv.DictWriter(self._file, COLUMNS)
        self._rows.writeheader()
        self._rows.writerows(kept)

    def write(self, step: int, numbers: Mapping[str, float | None]) -> None:
        self._rows.writerow({"step": step, **numbers})

    def close(self) -> None:
        self._file.close()


class _TensorBoard:
    """Events in ``tensorboard/``, for ``tensorboard --logdir`` of this run or of the folder of all runs."""

    def __init__(self, folder: Path, *, first: int, options: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first or None)

    def write(self, step: int, numbers: Mapping[str, float | None]) -> None:
        for name, number in numbers.items():
            if number is not None:
                self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """A run in ``wandb/`` with the options of this one; those of a run that goes on share a group."""

    def __init__(self, folder: Path, *, first: int, options: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "penstock"),
            name=f"{folder.name} from step {first}" if first else folder.name,
            group=folder.name,
            dir=folder,
            config=dict(options),
            mode=None if "WANDB_MODE" in os.environ else "offline",
            # What this process prints is ours to show, and a person reads it in one place.
            settings=wandb.Settings(console="off", silent=True),
        )

    def write(self, step: int, numbers: Mapping[str, float | None]) -> None:
        self._run.log({name: number for name, number in numbers.items() if number is not None}, step=step)

    def close(self) -> None:
        self._run.finish()


LOGGERS: Mapping[str, Callable[..., Logger]] = {
    "csv": _Table,
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
}


class Loggers:
    """All that ``logger=`` named, for ``with``; one that fails is told of once and left out from then on.

    Args: names: of ``LOGGERS``; first: the step that the run begins with; options: of the run, for those that
          show them; tell: is called with a sentence about one that failed."""

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        *,
        first: int,
        options: Mapping[str, Any],
        tell: Callable[[str], None],
    ) -> None:
        self._tell, self._loggers = tell, dict[str, Logger]()
        for name in names:
            with self._without(name):
                self._loggers[name] = LOGGERS[name](folder, first=first, options=options)

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, *_: object) -> None:
        self._each(lambda logger: logger.close())

    def step(self, report: Report) -> None:
        """Write what a step did."""
        line = step_line(report)
        step = line.pop("step")
        self._each(lambda logger: logger.write(step, line))

    def test(self, step: int, results: Mapping[str, float]) -> None:
        """Write the results of a test behind ``step`` by their names."""
        numbers = {f"test_{name}": result for name, result in results.items()}
        self._each(lambda logger: logger.write(step, numbers))

    def _each(self, do: Callable[[Logger], None]) -> None:
        for name, logger in list(self._loggers.items()):
            with self._without(name):
                do(logger)

    @contextlib.contextmanager
    def _without(self, name: str) -> Iterator[None]:
        """Go on without a logger that fails in the block; other people's code raises anything."""
        try:
            yield
        except Exception as error:
            self._loggers.pop(name, None)
            said = reason(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            self._tell(f"logger={name} failed ({said}); training goes on without it")


def _rows_before(first: int, path: Path) -> list[dict[str, str]]:
    """Read the rows before step ``first``; the test after that step is taken again."""
    kept = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            try:
                if int(row["step"]) + bool(row["test_loss"]) >= first or None in row.values():
                    break
            except (ValueError, KeyError, TypeError):
                break
            kept.append(row)
    return kept
