"""The course of a run: the batches of each epoch that are left, the test behind them, and what loads them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...compression.names import AUTO
from ...conf.schema import TrainConfig
from ..pipeline import Pipeline
from ..ranks.launch import cores, local_ranks
from ..samples.loader import Loader, WarmUp, workers_of
from ..samples.reading import Needs, PartTable, Place, Reading
from ..samples.samples import Samples
from .resume import position
from .run_length import count_steps, steps_of_an_epoch
from .sharing import share


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Where a run begins and ends.

    Args:    done: steps that it has behind it, of ``steps``; ``steps_of_an_epoch``; ``tests``: batches of the
             test split."""

    epochs: int
    steps: int
    steps_of_an_epoch: int
    tests: int
    done: int = 0

    def __iter__(self) -> Iterator[Place]:
        for epoch, numbers in self.by_epoch():
            yield from (Place("train", epoch, number) for number in numbers)
            yield from self.test()

    def by_epoch(self) -> Iterator[tuple[int, range]]:
        """Yield each epoch that has a step or its test to come, and the numbers of its batches."""
        (begin, done), left = position(self.done, self.steps_of_an_epoch), self.steps - self.done
        for epoch in range(begin, self.epochs):
            number = max(0, min(left, self.steps_of_an_epoch - done))
            yield epoch, range(done, done + number)
            left, done = left - number, 0
            if left <= 0:
                break

    def test(self) -> list[Place]:
        """The batches of a test."""
        return [Place("test", 0, number) for number in range(self.tests)]


def course(config: TrainConfig, samples: Samples, *, done: int) -> Course:
    """Return what is left of a run that has ``done`` so many steps."""
    return Course(
        epochs=config.epochs,
        steps=count_steps(config, samples),
        steps_of_an_epoch=steps_of_an_epoch(config, samples),
        tests=0 if samples.test is None else samples.num_batches("test", batch_size=config.batch_size),
        done=done,
    )


def loader(
    config: TrainConfig,
    samples: Samples,
    pipe: Pipeline,
    ahead: Course,
    *,
    folder: Path,
    tell: Callable[[str], None],
) -> Loader:
    """Return what loads the batches of ``ahead`` on this rank, as far as it computes with them; collective.

    Where samples may be left out every rank reads all, to leave out the same ones.
    Raises: ConfigError: the samples cannot be cached as asked."""
    train, through = share(config, samples, pipe, folder=folder, tell=tell)
    skips = bool(config.data.get("skip_broken", False))
    needs = Needs()
    if not skips:
        test = pipe.reads_tests()
        split = () if through is not None else _split(pipe)
        needs = Needs(inputs=pipe.reads_inputs, targets=pipe.reads_targets, split=split, test=test)
    tables = {"train": train} | ({} if samples.test is None else {"test": samples.test})
    read = {
        split: table for split, table in tables.items() if needs.inputs or not isinstance(table, PartTable)
    }
    spare = cores() // local_ranks(config.ranks) - (config.threads or 1)
    asked = config.data.get("workers", AUTO)
    threads = config.replicas.threads  # a process is not forked from among them, and one for each is dear
    asked = 0 if threads and asked == AUTO else asked
    workers = workers_of(asked, read.values(), cores=spare) if read else 0
    brings = {"train": through} if through is not None and "train" in read else {}
    reading = Reading(
        tables=tables,
        batch_size=config.batch_size,
        seed=config.seed,
        needs=needs,
        skips=skips,
        through=brings,
        epochs=config.epochs,
        used=ahead.steps_of_an_epoch * config.batch_size,
    )
    counts = {"batches": ahead.steps_of_an_epoch, "batch_size": config.batch_size, "workers": workers}
    return Loader(
        reading,
        ahead,
        workers=workers,
        pinned=pipe.world.device.is_gpu and needs == Needs(),  # what is without memory cannot be pinned
        start="spawn" if threads else None,
        deadline=config.deadline,
        warm_up=WarmUp(**counts) if brings else None,
        tell=tell,
    )


def _split(pipe: Pipeline) -> tuple[bool, ...]:
    """For each micro-batch whether this rank reads its inputs; nothing where no rank reads a part of them, or
    nobody knows ahead which."""
    if pipe.plan.replicas[0] == 1 or pipe.sharing.follows:
        return ()
    return tuple(pipe.reads(micro_batch) for micro_batch in range(pipe.plan.micro_batches))
