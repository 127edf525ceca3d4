"""Parts that all benches share: options, sides that take turns, ranks, tables and the file of results.

A figure is only compared with its neighbour in the same run: the speed of a machine differs from minute to
minute. Run a bench as ``python scripts/bench/TOPIC.py --help``."""

import argparse
import datetime
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist
from rich.table import Table
from torch import nn

from penstock.compression.errors import ConfigError, PenstockError, TransportError
from penstock.conf.schema import TrainConfig
from penstock.pipeline.distributed.launcher import run_rank, start_ranks
from penstock.pipeline.run import build, console
from penstock.pipeline.run.planning import prepare, training_batches
from penstock.pipeline.run.run_folder import RunFolder
from penstock.scripts import application
from penstock.scripts.circumstances import circumstances
from penstock.stages.files import save_json
from penstock.stages.plan.plan import Plan

Key = TypeVar("Key")
Result = TypeVar("Result")
Row = Mapping[str, Any]
Options = argparse.Namespace

NUM_BATCHES = 4  # kept in memory and used in turn: enough for training to differ from step to step
TOLERANCE, TOLERANCE_RANDOM = 1e-3, 0.2  # of first losses: what is rounding, and may be due to dropout
RANK, MEASURED = "rank", "measured.json"


# Sides that take turns.


def alternate(
    sides: Mapping[Key, Callable[[], Result]],
    repeats: int,
    *,
    seconds: float = math.inf,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Key, list[Result]]:
    """Run every side in turn, ``repeats`` times, or once and until ``seconds`` are over; return the results
    of each: entries of one index are neighbours."""
    results: dict[Key, list[Result]] = {name: [] for name in sides}
    start = clock()
    for number in range(repeats):
        if number and clock() - start >= seconds:
            break
        for name, run in sides.items():
            results[name].append(run())
    return results


def timed(
    call: Callable[[], object], times: int, *, clock: Callable[[], float] = time.perf_counter
) -> Callable[[], float]:
    """Return a run of ``times`` calls, which returns the seconds of one."""

    def run() -> float:
        start = clock()
        for _ in range(times):
            call()
        return (clock() - start) / times

    return run


def together(step: Callable[[], object], steps: int) -> float:
    """Take steps together with the other ranks; return the seconds of one."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - start) / steps


def medians(runs: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """Median run of each side."""
    return {name: statistics.median(values) for name, values in runs.items()}


def ratio_of_pairs(
    numerators: Sequence[float], denominators: Sequence[float], name: str = "speedup"
) -> dict[str, Any]:
    """Ratios of neighbouring runs, and their median, as fields of a row."""
    pairs = [a / b for a, b in zip(numerators, denominators, strict=True)]
    return {name: statistics.median(pairs), f"{name}_of_pairs": pairs}


def refuse_other_losses(losses: Mapping[str, float], model: nn.Module) -> None:
    """Refuse to compare sides that do not train the same: no schedule changes the loss of the first step."""
    draws = any(getattr(module, "p", 0) for module in model.modules() if "Drop" in type(module).__name__)
    (first, expected), *others = losses.items()
    for name, loss in others:
        if not math.isclose(loss, expected, rel_tol=TOLERANCE_RANDOM if draws else TOLERANCE):
            raise PenstockError(
                f"all sides must train the same, and their first losses are {expected:.6f} with {first} and "
                f"{loss:.6f} with {name}; this is a fault of the bench or of torch's stages with this model"
            )


# Options.


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parser(description: str | None, *, job: str = "", repeats: int = 3) -> argparse.ArgumentParser:
    """Return a parser with the options that all benches have; ``job``: its defaults, where there is one."""
    options = _Parser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = options.add_argument
    if job:
        meaning = f"options of `penstock train` for the job, such as model=resnet18; here: {job}"
        add("job", nargs="*", metavar="KEY=VALUE", help=meaning)
    add("--repeats", type=at_least(1), default=repeats, help="runs of each side; medians count")
    add("--results", type=Path, help="JSON file for the results; none: a new one in runs/")
    return options


def at_least(least: float) -> Callable[[str], Any]:
    """Return the type of a number, whole where ``least`` is."""

    def parse(text: str) -> float:
        try:
            number = type(least)(text)
        except ValueError:
            number = math.nan
        if not (least <= number < math.inf):
            raise ConfigError(f"{text} must be a {'whole ' * (type(least) is int)}number of {least} or more")
        return number

    return parse


def list_of(parse: Callable[[str], Any] = str, known: Collection[str] = ()) -> Callable[[str], list[Any]]:
    """Return the type of a list with commas between its items, each of them ``known`` if any are."""

    def convert(text: str) -> list[Any]:
        for item in (items := text.split(",")):
            if known and item not in known:
                raise ConfigError(f"{item} is not known; known are {', '.join(known)}")
        return [parse(item) for item in items]

    return convert


def train_config(
    typed: Sequence[str], defaults: Mapping[str, Any], fixed: Mapping[str, Any] | None = None
) -> TrainConfig:
    """Compose the job that KEY=VALUE options describe, checked as ``penstock train`` checks it.

    Args: defaults: of what is not typed; fixed: what the bench needs, which may not be typed."""
    keys, fixed = {item.partition("=")[0].lstrip("+") for item in typed}, fixed or {}
    for key in keys & fixed.keys():
        raise ConfigError(f"this bench trains with {key}={fixed[key]}; drop {key}=")
    values = {"scheduler": "none", "epochs": 1_000_000, "deadline": 120, **defaults, **fixed}
    given = [f"{key}={value}" for key, value in values.items() if not keys & {key, f"{key}._target_"}]
    composed = application.options("train", TrainConfig, arguments=[*given, *typed])
    assert composed, "there are no flags"
    return composed[0]


# One job, on this process or on ranks.


class Job:
    """Data, batches and fresh models of a job; prepares this process for it."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.samples = config, prepare(config)
        self.optimizer = build.optimizer(config.optimizer)

    def model(self) -> nn.Module:
        """Return the model with its initial weights."""
        config = self.config
        return build.model(config.model, describe=self.samples.describe, seed=config.seed).train()

    def batches(self, number: int = NUM_BATCHES) -> list[Any]:
        """Return the first batches."""
        return list(islice(training_batches(self.config, self.samples), number))


def measure_on_ranks(
    topic: str,
    folder: RunFolder,
    options: Options,
    config: TrainConfig,
    plans: Mapping[str, Plan],
    *,
    ranks: int,
    facts: Mapping[str, Any] | None = None,
    **places: Any,
) -> Any:
    """Run ``rank`` of a topic's file on every rank; return what rank 0 saved as ``measured.json``.

    Args: facts: what else ``options`` has there; places: where ranks run, see ``start_ranks``."""
    shared = {name: value for name, value in vars(options).items() if name != "results"} | dict(facts or {})
    save_json(folder.path / "options.json", shared)
    (folder.path / "plans").mkdir(exist_ok=True)
    for name, plan in plans.items():
        plan.save(folder.path / "plans" / f"{name}.json")
    folder.tell(config, next(iter(plans.values())))
    measured = folder.path / MEASURED
    measured.unlink(missing_ok=True)
    stages = [[rank] for rank in range(ranks)]
    start_ranks(topic, [RANK, str(folder.path)], errors=folder.errors, stages_of_rank=stages, **places)
    if not measured.exists():
        raise TransportError("the ranks ended without a result; look at their output above")
    return json.loads(measured.read_text())


def load_plans(folder: RunFolder) -> dict[str, Plan]:
    """Return the plans of a folder by name."""
    return {path.stem: Plan.load(path) for path in sorted((folder.path / "plans").glob("*.json"))}


# Results.


class Results:
    """The file of results: circumstances first, rows as they are measured."""

    def __init__(self, path: Path, **facts: Any) -> None:
        command = ["python", f"scripts/bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]
        self.path, self.content = path, circumstances(command) | facts

    def keep(self, **values: Any) -> None:
        """Add values and write the file; lists are appended to those of the same name."""
        for name, value in values.items():
            self.content[name] = self.content.get(name, []) + value if isinstance(value, list) else value
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_json(self.path, self.content)

    def folder(self) -> RunFolder:
        """Return the folder of the file, in whose ``errors`` failing ranks leave their tracebacks."""
        return RunFolder(path=self.path.parent)


def show(
    rows: Sequence[Row], columns: Mapping[str, str | Callable[[Row], str]], *, title: str = "", left: int = 1
) -> None:
    """Print a table of rows, the first ``left`` columns flush left.

    Args: columns: by heading a format of the row's fields, or a function; without it a cell is empty."""
    table = Table(title=title or None, title_justify="left")
    for number, heading in enumerate(columns):
        table.add_column(heading, justify="left" if number < left else "right", no_wrap=True)

    def cell(row: Row, form: str | Callable[[Row], str]) -> str:
        try:
            return form.format_map(row) if isinstance(form, str) else form(row)
        except (KeyError, TypeError):  # the row has no such field, or none to format
            return ""

    for row in rows:
        table.add_row(*(cell(row, form) for form in columns.values()))
    console.screen(width_of_a_log=160).print(table)


def spread(values: Sequence[float]) -> str:
    """Least and most of the values."""
    return f"{min(values):.2f}-{max(values):.2f}"


def main(
    made: argparse.ArgumentParser,
    bench: Callable[[Options, Path], Results],
    *,
    rank: Callable[[RunFolder, Options], Any] | None = None,
) -> None:
    """Run the bench that the command line asks for, or a rank of it, and leave with the exit code."""
    if rank is not None and sys.argv[1:2] == [RANK]:
        folder = RunFolder(path=Path(sys.argv[2]))
        options = Options(**json.loads((folder.path / "options.json").read_text()))

        def measure() -> None:
            measured = rank(folder, options)
            if os.environ["RANK"] == "0":
                save_json(folder.path / MEASURED, measured)

        run_rank(measure, folder.errors)
    topic = Path(sys.argv[0]).stem
    try:
        options = made.parse_intermixed_args()
        now = datetime.datetime.now()
        path = options.results or Path("runs", f"bench_{topic}_{now:%Y-%m-%d_%H-%M-%S}.json")
        results = bench(options, path)
        results.keep(load_after=os.getloadavg())
        print(path)
    except PenstockError as error:
        print(f"{topic}.py: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{topic}.py: stopped", file=sys.stderr)
        sys.exit(130)
