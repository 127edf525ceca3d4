"""The loop of a run on one rank: which batches it takes, its steps and tests, and what it leaves behind."""

import contextlib
import dataclasses
import functools
import math
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from ...compression.errors import ConfigError
from ...compression.names import AUTO
from ...conf.schema import TrainConfig
from ...stages.files import save_json
from ...stages.plan.plan import Plan
from ...stages.units import parse_duration
from ..data.batches import BatchIndex, BatchReader, Needs, PartTable, Table
from ..data.cached import CachedDataset, CacheReader, cache_reader, sample_source
from ..data.image_folder import Files
from ..data.loader import BatchLoader, WarmUp, in_memory, workers_of
from ..data.samples import IterableTable, MapTable, Samples
from ..data.storage import check_shared
from ..distributed.launcher import cores, local_ranks
from ..distributed.process_group import hearing
from ..distributed.processes import Stopped
from ..pipeline import Pipeline
from ..runtime.evaluation import Means
from ..runtime.report import Report
from . import console, prediction
from .checkpoints import Checkpoints, keeping, write_model
from .digests import record_digests
from .live_audit import LiveAudit
from .logs import JsonLog, Loggers, shares_log
from .metrics import Totals, numbers_of_test, step_line, summarise
from .planning import count_steps, model_name, save_step, steps_of_an_epoch
from .resume import position, take_over
from .run_folder import RunFolder
from .schedule_comparison import simulated
from .tables import foretell, overrun

BETWEEN = 10  # batches of a test; an exchange behind each would cost small ones a tenth of their time
NOT_FINITE = 3  # exit code of a run that ended because its loss was no number
_OVERFLOWS = 10  # steps in a row that a GradScaler may skip until it has found its scale
_STATE = ("metric", "best", "best_step", "since")


class Judge:
    """Sees every step and every test on each rank, and decides alike on all of them.

    Attributes:
        ended: Why the run ends now; empty while it goes on.
        metric: Result of a test that decides which is the best; ``best`` is that of the best test.
        best_step: Steps that were done before that test; ``since``: tests after it.
    """

    def __init__(self, config: TrainConfig, plan: Plan, *, tell: Callable[[str], None]) -> None:
        self.ended, self.metric = "", config.checkpoint.best or "loss"
        self.best: float | None = None
        self.best_step = self.since = 0
        self._tell, self._patience, self._stops = tell, config.eval.patience, config.nan == "stop"
        # Where few micro-batches fill a stream, its first steps finish none, and have no loss.
        self._allowed = plan.num_stages if plan.streams else _OVERFLOWS * (config.loss_scale == "dynamic")
        self._in_a_row, self._told = 0, False

    def step(self, report: Report) -> None:
        """Warn of the first loss that is no number, and end the run unless ``nan=warn``."""
        self._in_a_row = 0 if math.isfinite(report.loss) else self._in_a_row + 1
        if self._told or self._in_a_row <= self._allowed:
            return
        self._told, sentence = True, f"step {report.step + 1}: the loss is {report.loss}"
        ends = "the run ends; begin anew" if self._stops else "the run goes on; better begin anew"
        remedy = "with a lower optimizer.lr or clip.norm=1, or have detect_anomaly=true name the layer"
        self._tell(f"{sentence}, and {ends} {remedy}")
        self.ended = sentence if self._stops else ""

    def test(self, results: Mapping[str, float], step: int) -> bool:
        """Return True if no test was as good before."""
        if (name := self.metric) not in results:
            self._tell(f"checkpoint.best={name}: these tests have no {name}, so the loss decides")
            self.metric = "loss"
        result, sign = results[self.metric], 1 if self.metric == "accuracy" else -1
        again = step == self.best_step  # by a run that goes on
        is_best = again or self.best is None or sign * result > sign * self.best
        if is_best := is_best and math.isfinite(result):
            self.best, self.best_step, self.since = result, step, 0
        elif not again:
            self.since += 1
        if self._patience is not None and self.since >= self._patience:
            best = "no number" if self.best is None else f"{self.best:.4f} after step {self.best_step}"
            self.ended = f"no better test in the last {self.since}: {self.metric} {best}"
            self._tell(f"step {step}: {self.ended}; the run ends")
        return is_best

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {name: getattr(self, name) for name in _STATE}

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from what a checkpoint kept, if its tests were compared by the same result."""
        if state and state["metric"] == self.metric:
            vars(self).update({name: state[name] for name in _STATE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Steps from the beginning of a run to its end.

    Attributes:
        done: Steps before it, of ``steps``.
        every: Steps from one test to the next within an epoch; 0: no such tests.
        tests: Batches of the test split."""

    epochs: int
    steps: int
    steps_of_an_epoch: int
    tests: int
    done: int = 0
    every: int = 0

    def __iter__(self) -> Iterator[BatchIndex]:
        for epoch, numbers in self.by_test():
            yield from (BatchIndex("train", epoch, number) for number in numbers)
            yield from self.test()

    def by_test(self) -> Iterator[tuple[int, range]]:
        """Yield the numbers of the batches before each test that is to come, and their epoch.

        The test at which a run was stopped is done again."""
        (begin, first), left = position(self.done, self.steps_of_an_epoch), self.steps - self.done
        for epoch in range(begin, self.epochs):
            last = first + max(0, min(left, self.steps_of_an_epoch - first))
            before = epoch * self.steps_of_an_epoch
            tests = range(first or 1, last) if self.every else ()
            ends = [number for number in tests if (before + number) % self.every == 0]
            for start, end in pairwise([first, *ends, last]):
                yield epoch, range(start, end)
            left, first = left - (last - first), 0
            if left <= 0:
                break

    def test(self) -> list[BatchIndex]:
        """The batches of a test."""
        return [BatchIndex("test", 0, number) for number in range(self.tests)]


def course(config: TrainConfig, samples: Samples, *, done: int) -> Course:
    """Return what is left of a run that has ``done`` so many steps."""
    tests = 0 if samples.test is None else samples.num_batches("test", batch_size=config.batch_size)
    counts = {"steps": count_steps(config, samples), "steps_of_an_epoch": steps_of_an_epoch(config, samples)}
    return Course(epochs=config.epochs, tests=tests, done=done, every=config.eval.every or 0, **counts)


def loader(
    config: TrainConfig,
    samples: Samples,
    pipe: Pipeline,
    ahead: Course,
    *,
    folder: Path,
    tell: Callable[[str], None],
) -> BatchLoader:
    """Return what loads the batches of ``ahead`` on this rank, as far as it reads them; collective."""
    # 1. the broker may give first epochs their turns; no rank's wait ends meanwhile
    train, through = _share(config, samples, pipe, folder=folder, tell=tell)
    waits = False
    while through is not None:
        if pipe.world.broadcast(float(pipe.rank > 0 or through.cache.has_turn()), 0, at="its turn"):
            break
        if not waits:
            tell("waits until the first epoch of another job is over: the cache has warm_up=alone")
        waits = True
        time.sleep(0.2)
    # 2. what this rank reads; where samples may be left out all of it, to leave out the same ones
    skips, needs = bool(config.data.get("skip_broken", False)), Needs()
    if not skips:
        in_parts = through is None and pipe.plan.replicas[0] > 1 and not pipe.load_balancer.follows
        split = tuple(map(pipe.reads, range(pipe.plan.micro_batches))) if in_parts else ()
        reads = {"inputs": pipe.reads_inputs, "targets": pipe.reads_targets, "test": pipe.reads_tests()}
        needs = Needs(**reads, split=split)
    tables = {"train": train} | ({} if samples.test is None else {"test": samples.test})
    read = {name: table for name, table in tables.items() if needs.inputs or not isinstance(table, PartTable)}
    brings = {"train": through} if through is not None and "train" in read else {}
    # 3. who loads it
    spare = cores() // local_ranks(config.ranks) - (config.threads or 1)
    asked = config.data.get("workers", AUTO)
    threads = config.replicas.threads  # a process is not forked from among them, and one for each is dear
    asked = 0 if threads and asked == AUTO else asked
    workers = workers_of(asked, read.values(), cores=spare) if read else 0
    options: Any = {name: getattr(config, name) for name in ("batch_size", "seed", "epochs")}
    used = ahead.steps_of_an_epoch * config.batch_size
    reading = BatchReader(tables=tables, needs=needs, skips=skips, through=brings, used=used, **options)
    counts = {"batches": ahead.steps_of_an_epoch, "batch_size": config.batch_size, "workers": workers}
    return BatchLoader(
        reading,
        ahead,
        workers=workers,
        pinned=pipe.world.device.is_gpu and needs == Needs(),  # what is without memory cannot be pinned
        start="spawn" if threads else None,
        deadline=config.deadline,
        warm_up=WarmUp(**counts) if brings else None,
        tell=tell,
    )


def evaluate(
    pipe: Pipeline, batches: Iterable[tuple[Any, Any]], *, between: Callable[[], None]
) -> dict[str, float]:
    """Return the mean loss over the batches of a test, and for classes the accuracy; nothing of no batch."""
    criterion, number = pipe.engine.criterion, 0
    means = Means({"accuracy": _share_right, "loss": criterion.loss}, autocast=criterion.autocast)
    for number, (inputs, targets) in enumerate(batches, start=1):
        if number % BETWEEN == 0:
            between()
        outputs = pipe.evaluate(inputs)
        if outputs is not None:
            is_one = isinstance(targets, Tensor)
            count = targets.numel() if is_one else pipe.call.samples_of(pipe.call.tensors(inputs))
            means.add(outputs, targets, count)
    if not number:
        return {}
    found = means.on_all_ranks(pipe.agreement, pipe.plan)
    return {name: mean for name, mean in found.items() if name == "loss" or not math.isnan(mean)}


def _share_right(outputs: Any, targets: Any) -> float:
    """Return the share of targets that are the class with the largest output; NaN where they are none."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or targets.is_floating_point():
        return math.nan
    if outputs.shape[:-1] != targets.shape or outputs.shape[-1] < 2:
        return math.nan
    return float((outputs.argmax(-1) == targets).double().mean())


def train_rank(config: TrainConfig, plan: Plan, folder: RunFolder, samples: Samples, pipe: Pipeline) -> None:
    """Train this rank's stages; rank 0 also tells and writes what happens."""

    def stop(number: int) -> None:
        """End every rank behind a checkpoint; collective."""
        kept.now()
        pipe.close()
        raise Stopped(number)

    def between() -> None:
        """Stop in the middle of a test, which the run that goes on does again; collective."""
        rows = pipe.world.all_gather([pipe.asked], at="the middle of a test")
        if asked := int(max(row[0] for row in rows)):
            stop(asked)

    def run_epochs() -> dict[str, float]:
        """Take the steps that are left and the tests between them, until ``judge`` ends it; return the
        results of the test after the last step, if there was one."""
        test: dict[str, float] = {}
        for epoch, numbers in ahead.by_test():
            for number in numbers:
                report = pipe.step(*batches.take(BatchIndex("train", epoch, number)))
                for one in see:
                    one(report)
                    if judge.ended:
                        return {}
            test = evaluate(pipe, map(batches.take, ahead.test()), between=between)
            if test:
                tested(epoch, numbers, test)
            if judge.ended:
                break
        return test

    def tested(epoch: int, numbers: range, test: Mapping[str, float]) -> None:
        """Write and show the results of a test, and keep a checkpoint of the best one."""
        loggers.test(pipe.num_steps - 1, test)
        metrics.amend(pipe.num_steps - 1, numbers_of_test(test))
        known = f"test accuracy {test['accuracy']:.2%}, " if "accuracy" in test else ""
        within = numbers.stop < ahead.steps_of_an_epoch and pipe.num_steps < ahead.steps
        where = f"step {pipe.num_steps}/{ahead.steps}" if within else f"epoch {epoch + 1}/{config.epochs}"
        tell(f"{where}: {known}test loss {test['loss']:.4f}")
        if judge.test(test, pipe.num_steps) and config.checkpoint.best:
            kept.best()

    num_steps, first, every = count_steps(config, samples), pipe.rank == 0, config.digest.every
    totals = Totals(num_stages=plan.num_stages)
    mark = folder.mark() if first else None
    with console.Training(num_steps, shown=first) as progress:
        path, tell = folder.metrics if first else None, progress.note
        names, options = config.loggers if first else (), dataclasses.asdict(config)
        notes, resumed = take_over(pipe, config.resume, folder.metrics, progress)
        if pipe.world.size > 1:
            gather = functools.partial(pipe.world.all_gather_json, at="the storage of its samples")
            check_shared(config.data, rank=pipe.rank, gather=gather)
        ahead = course(config, samples, done=pipe.num_steps)
        loads = loader(config, samples, pipe, ahead, folder=folder.path, tell=tell)
        judge = Judge(config, plan, tell=tell)
        judge.load(notes.get("judge"))
        best_step = judge.best_step if config.checkpoint.best else 0
        audits: contextlib.AbstractContextManager[LiveAudit | None] = contextlib.nullcontext()
        if first and config.audit.every is not None:
            after: Any = {"seconds": parse_duration(config.audit.every, name="audit.every")}
            audits = contextlib.closing(LiveAudit(folder, digest_every=every or 1, tell=tell, **after))
        with (
            JsonLog(path, tell=tell, first=pipe.num_steps) as metrics,
            JsonLog(folder.digests if first and every else None, tell=tell, first=pipe.num_steps) as digests,
            JsonLog(folder.world if first and every else None, tell=tell, first=pipe.num_steps) as world,
            JsonLog(folder.starts if first else None, tell=tell, first=pipe.num_steps) as starts,
            shares_log(pipe, folder.shares if first else None, tell=tell) as log_shares,
            Loggers(names, folder.path, first=pipe.num_steps, options=options, tell=tell) as loggers,
            Checkpoints(pipe, folder.checkpoints, config.checkpoint, tell=tell, best_step=best_step) as kept,
            hearing(pipe.world.group, lambda number: setattr(pipe, "asked", number)),
            contextlib.closing(loads) as batches,
            audits as audit,
        ):
            totals.load(notes.get("totals"))
            if audit is not None:
                audit.result |= notes.get("audit", {})
            if ahead.tests and (names := sorted(pipe.steps.written_in_eval)):
                tell(
                    f"tests change bits, so eval.every= does: in eval mode too a forward writes to {names[0]}"
                )
            audited = {} if audit is None else {"audit": audit.result}
            noted: Any = {"config": options, **audited}
            kept.notes = lambda: noted | {"totals": totals.kept(), "judge": judge.state()}
            if first:
                stored = OmegaConf.to_yaml(OmegaConf.create(options | folder.held_now(config)))
                starts.append({"step": pipe.num_steps, "config": stored, "plan": plan.to_json()})
            see = [totals.add, lambda report: metrics.append(step_line(report)), progress.step]
            see += [foretell(plan, tell), overrun(plan, tell)]
            if every:
                layers = config.digest.layers
                see.append(record_digests(pipe, digests, world=world, every=every, layers=layers, tell=tell))
            see += [loggers.step, judge.step, kept.after]
            see += [audit.after] if audit is not None else []
            see += [lambda report: stop(report.asked) if report.asked else None, log_shares]
            test = run_epochs()
    pipe.drain()
    data = pipe.world.all_gather_json(batches.figures, at="the end of its data")
    spans, flows = pipe.timeline(), pipe.flows()
    sizes = {key: pipe.state.expected[key].numel() for key in pipe.state.keys}
    write_model(pipe, folder.model, before=lambda: mark and folder.check(mark))
    if mark is None:
        return
    with keeping(folder.model):
        _, panel = simulated(plan)
        if spans:  # a run that goes on may have had no step left
            stream = f" weights={plan.weights}{' prediction=true' * plan.prediction}" * plan.streams
            stream += " error_feedback=true" * plan.error_feedback
            job = f"schedule={plan.schedule}{stream} micro_batches={plan.micro_batches}"
            job += f" stages={plan.num_stages} ranks={plan.num_ranks}"
            save_step(
                folder, plan, panel, spans, title=f"{model_name(config)}, step {pipe.num_steps - 1}: {job}"
            )
        facts = {"ranks": plan.num_ranks, "threads": config.threads, "cores": cores(), "codec": plan.codec}
        facts |= {"turns": [dataclasses.asdict(turn) for turn in pipe.policy.turns], "flows": flows}
        facts |= {"prediction": prediction.compare(plan, panel, totals, rates=pipe.policy.rates)}
        facts |= {"resumed_from": resumed, "data": data, "ended_early": judge.ended or None}
        facts |= audited
        save_json(folder.summary, summarise(totals, plan, sizes=sizes, test=test, **facts))


def check_samples(config: TrainConfig, samples: Samples) -> None:
    """Refuse what depends on tests where there is nothing to test on, and samples that cannot be cached."""
    asked = {"eval.every": config.eval.every, "eval.patience": config.eval.patience}
    asked |= {"checkpoint.best": config.checkpoint.best}
    for name, value in asked.items():
        if value and samples.test is None:
            raise ConfigError(
                f"{name}={value} needs samples to test on, and the data have none; return (train, test) "
                f"from data._target_, or leave out {name}="
            )
    if config.cache.mode != "none" and not in_memory(samples.train):
        sample_source(_dataset(samples.train), decoded=config.cache.decoded)


def _share(
    config: TrainConfig, samples: Samples, pipe: Pipeline, *, folder: Path, tell: Callable[[str], None]
) -> tuple[Table, CacheReader | None]:
    """Return the samples to train on, and what brings them through the cache, if asked for; collective."""
    options, table = config.cache, samples.train
    if options.mode == "none":
        return table, None
    run = pipe.world.all_gather_json(uuid.uuid4().hex, at="the name of its run")[0]
    if in_memory(table):
        tell(f"cache={options.mode}: these samples lie in memory, so none of them goes through the cache")
        return table, None
    dataset, job = _dataset(table), options.job or folder.name
    facts: Any = {name: getattr(options, name) for name in ("data", "socket", "backend", "share")}
    facts |= {"batch_size": config.batch_size, "epochs": config.epochs}
    source, number = sample_source(dataset, decoded=options.decoded), samples.num_samples("train")
    through = cache_reader(source, job=job, run=run, num_samples=number, **facts)
    if isinstance(table, Files):
        return dataclasses.replace(table, through=through.payloads), through
    asks = CachedDataset(dataset, through)
    return (dataclasses.replace(table, dataset=asks) if isinstance(table, MapTable) else asks), through


def _dataset(table: Table) -> Any:
    return table.dataset if isinstance(table, MapTable | IterableTable) else table
