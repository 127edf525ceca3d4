"""What every rank of ``penstock bench replicas`` runs: all sides live in the same processes and take turns.

A side of fewer ranks than there are has a world of the first of them, and the others wait at a barrier, so
that a busy machine is busy for all sides alike."""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...conf.bench_replicas import BenchReplicasConfig
from ...pipeline.pipeline import Pipeline
from ...pipeline.ranks.launch import init, run_rank
from ...pipeline.ranks.world import World
from ...pipeline.run import build
from ...pipeline.run.decide import prepare
from ...pipeline.run.epochs import loss
from ...pipeline.run.run_length import training_batches
from ...pipeline.schedules.instruction import Instruction, Op
from ...pipeline.schedules.simulate import durations, simulate
from ...pipeline.schedules.span import Span
from ...stages.files import save_json
from ...stages.planner.plan import Plan
from . import replicas_sides as sides
from .fairness import is_random, refuse_other_losses
from .harness import alternate

NUM_BATCHES = 4
"""Batches kept in memory and used in turn."""

COUNTED = Path("/proc/self/io")
"""Where Linux counts what a process writes, to sockets too: gloo's writes are counted, not estimated."""

SETTLING_SECONDS = 0.02
"""Until what was sent before an exchange has left."""


class Side:
    """A pipeline on the first ranks of all, of which this is one if it is ``here``; ``factor``: how often
    as long as it takes each forward and backward of this rank lasts."""

    def __init__(self, plan: Plan, world: World | None, make: Callable[..., Pipeline], batches: Any) -> None:
        self.plan, self.here, self.factor = plan, world is not None, 1.0
        self.batches, self.spans = cycle(batches), list[Span]()
        if world is None:
            return
        self.pipe = make(plan, world)
        run = self.pipe.engine.run
        for op in (Op.F, Op.B):
            run[op] = functools.partial(self._slowed, run[op])

    def _slowed(self, run: Callable[..., None], *what: Any) -> None:
        began = time.perf_counter()
        run(*what)
        if self.factor > 1:
            time.sleep((self.factor - 1) * (time.perf_counter() - began))

    def run(self, steps: int) -> float:
        """Take steps together with the other ranks of the side; return the seconds of one, by all ranks'
        clocks."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps if self.here else 0):
            self.last = self.pipe.step(*next(self.batches))
        if self.here:
            self.spans += self.pipe.timeline()
        dist.barrier()
        return (time.perf_counter() - began) / steps

    def simulated(self) -> float:
        """A step if each instruction took its usual time of the runs, and messages none."""
        known = durations(self.spans)

        def work(one: Instruction) -> float:
            return known.get((one.stage, one.op.value), 0.0)

        return simulate(self.pipe.engine.meter.step.messages, work=work, transfer=lambda _: 0.0).seconds

    def updates(self) -> float:
        """Seconds of an update and the exchange in front of it."""
        return seconds_of_updates(self.spans)


def seconds_of_updates(spans: Sequence[Span]) -> float:
    """Seconds of an update, of the stage that takes longest: the median over steps of what it takes on the
    rank that waits least for others."""
    found: dict[int, dict[int, list[float]]] = {}
    for span in spans:
        if span.op == Op.U.value:
            found.setdefault(span.stage, {}).setdefault(span.rank, []).append(span.end - span.start)
    return max(statistics.median(map(min, zip(*ranks.values(), strict=True))) for ranks in found.values())


class Everybody:
    """All sides of this rank, and the world of all ranks."""

    def __init__(self, config: BenchReplicasConfig, folder: Path) -> None:
        self.config, self.world = config, init(deadline=config.deadline)
        job = config.job()
        samples = prepare(job)
        batches = list(islice(training_batches(job, samples, epoch=0), NUM_BATCHES))
        made = {number: dist.new_group(list(range(number))) for number in range(2, self.world.size)}
        self.worlds = {n: World(group) for n, group in made.items() if self.world.rank < n}
        worlds = self.worlds | {1: World.alone(), self.world.size: self.world}
        self.random = False

        def make(plan: Plan, world: World) -> Pipeline:
            model = build.model(config.model, describe=samples.describe, seed=config.seed).train()
            self.random = is_random(model)
            common: Any = {"seed": config.seed, "deadline": config.deadline}
            optimizer = build.optimizer(config.optimizer)
            return Pipeline(model, plan, loss=loss, optimizer=optimizer, world=world, **common)

        self.all: dict[str, Side] = {}
        for path in sorted((folder / "plans").glob("*.json")):
            plan = Plan.load(path)
            everywhere = path.stem == sides.ALONE and self.world.rank < 2  # to sum up two speeds
            here = self.world.rank < plan.num_ranks or everywhere
            self.all[path.stem] = Side(plan, worlds[plan.num_ranks] if here else None, make, batches)

    def warm_up(self) -> None:
        """A step of everybody, whose losses must be one."""
        for side in self.all.values():
            side.run(1)
        mine = {name: side.last.loss for name, side in self.all.items() if side.here}
        refuse_other_losses(mine, random=self.random)

    def speeds(self) -> dict[str, Any]:
        """Runs of two ranks, of which one takes its time, beside each of them on its own."""
        taken: dict[str, Any] = {}
        for factor in self.config.factors:
            names = [sides.EVEN, *([name] if (name := sides.weighted(factor)) in self.all else [])]
            turns: dict[str, Any] = {sides.ALONE: functools.partial(self._each, factor)}
            turns |= {name: functools.partial(self._throttled, name, factor) for name in names}
            taken[str(factor)] = alternate(turns, self.config.repeats)
        return taken

    def _throttled(self, name: str, factor: float) -> float:
        side = self.all[name]
        side.factor = factor if self.world.rank == 1 else 1.0
        try:
            return side.run(self.config.steps)
        finally:
            side.factor = 1.0

    def _each(self, factor: float) -> list[float]:
        """Samples per second of each of two ranks, at the same time, each on its own."""
        side, speed = self.all[sides.ALONE], 0.0
        dist.barrier()
        if side.here:
            side.factor = factor if self.world.rank == 1 else 1.0
            began, steps = time.perf_counter(), 0
            while not steps or time.perf_counter() - began < self.config.seconds:
                side.pipe.step(*next(side.batches))
                steps += 1
            speed, side.factor = steps * self.config.batch_size / (time.perf_counter() - began), 1.0
        return [row[0] for row in self.world.all_gather([speed])][:2]

    def turns(self, part: str) -> dict[str, Any]:
        """Seconds of a step of every side of a part, in turn; of each what was simulated from its spans."""
        names = sides.PARTS[part]
        for name in names:
            self.all[name].spans.clear()
        runs = alternate(
            {n: functools.partial(self.all[n].run, self.config.steps) for n in names}, self.config.repeats
        )
        if self.world.rank:
            return {}
        found = {name: self.all[name] for name in names}
        return {
            name: {"seconds": runs[name], "simulated": side.simulated(), "update": side.updates()}
            for name, side in found.items()
        }

    def bytes(self) -> dict[str, Any]:
        """What a step of every side sends, by what it is: frames by their own sizes, the exchange and all by
        what the system counted of every process."""
        return {name: self._bytes(self.all[name]) for name in sides.PARTS["bytes"]}

    def _bytes(self, side: Side) -> dict[str, Any]:
        exchanged, total = [0], 0
        if side.here:
            update = side.pipe.update
            plain = update.exchange

            def counted(stage: int) -> None:
                side.pipe.world.barrier()
                time.sleep(SETTLING_SECONDS)
                before = written()
                plain(stage)
                exchanged[0] += sides.wire_bytes(before, written())

            update.exchange = counted
            side.pipe.step(*next(side.batches))
            exchanged[0] = 0
            before = written()
            report = side.pipe.step(*next(side.batches))
            time.sleep(SETTLING_SECONDS)
            total, update.exchange = sides.wire_bytes(before, written()), plain
        rows = self.world.all_gather([total, exchanged[0]])
        if self.world.rank:
            return {}
        return {
            "activations": sum(stage.forward_sent for stage in report.stages),
            "gradients": sum(stage.backward_sent for stage in report.stages),
            "exchange_of_ranks": [int(row[1]) for row in rows],
            "total_of_ranks": [int(row[0]) for row in rows],
            "parameters": [4 * stage.num_parameters for stage in side.plan.stages],
        }


def written() -> dict[str, int]:
    """What Linux says that this process wrote so far."""
    pairs = (line.split(":") for line in COUNTED.read_text().splitlines())
    return {name: int(value) for name, value in pairs}


def race_rank(folder: Path, parts: Sequence[str]) -> None:
    """Take part on this rank; rank 0 writes ``measured.json``."""
    told: Mapping[str, Any] = json.loads((folder / "race.json").read_text())
    everybody = Everybody(BenchReplicasConfig(**told), folder)
    everybody.warm_up()
    run = {"speeds": everybody.speeds, "bytes": everybody.bytes}
    found = {part: run[part]() if part in run else everybody.turns(part) for part in parts}
    for world in everybody.worlds.values():
        world.close()
    if everybody.world.rank == 0:
        save_json(folder / "measured.json", found)
    everybody.world.close()


if __name__ == "__main__":
    where = Path(sys.argv[1])
    run_rank(lambda: race_rank(where, sys.argv[2:]), where / "errors")
