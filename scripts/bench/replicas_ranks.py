"""What every rank of ``penstock bench replicas`` runs: all sides live in the same processes and take turns.

A side of fewer ranks than there are has a world of the first of them, and the others wait at a barrier, so
that a busy machine is busy for all sides alike."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
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
from ...pipeline.run.metrics import DIRECTIONS
from ...pipeline.run.run_length import training_batches
from ...stages.files import save_json
from ...stages.planner.plan import Plan
from . import replicas_sides as sides
from .fairness import is_random, refuse_other_losses
from .harness import alternate
from .replicas_side import Side

NUM_BATCHES = 4
"""Batches kept in memory and used in turn."""

COUNTED = Path("/proc/self/io")
"""Where Linux counts what a process writes, to sockets too: gloo's writes are counted, not estimated."""

SETTLING_SECONDS = 0.02
"""Until what was sent before an exchange has left."""


class Everybody:
    """The sides of this rank, of which those of one part are there at a time, and the world of all ranks."""

    def __init__(self, config: BenchReplicasConfig, folder: Path) -> None:
        self.config, self.world = config, init(deadline=config.deadline)
        job = config.job()
        samples = prepare(job)
        batches = list(islice(training_batches(job, samples, epoch=0), NUM_BATCHES))
        made = [dist.new_group(list(range(number))) for number in range(2, self.world.size)]  # all found all
        mine = [group for group in made if isinstance(group, dist.ProcessGroup)]
        founded = [World(group, deadline=config.deadline) for group in mine]
        self.worlds = {world.size: world for world in founded}
        self.by_size = self.worlds | {1: World.alone(), self.world.size: self.world}
        self.random, self.batches = False, batches
        self.plans = {path.stem: Plan.load(path) for path in sorted((folder / "plans").glob("*.json"))}

        def make(plan: Plan, world: World) -> Pipeline:
            model = build.model(config.model, describe=samples.describe, seed=config.seed).train()
            self.random = is_random(model)
            common: Any = {"seed": config.seed, "deadline": config.deadline}
            optimizer = build.optimizer(config.optimizer)
            return Pipeline(model, plan, loss=loss, optimizer=optimizer, world=world, **common)

        self.make, self.all = make, dict[str, Side]()

    @contextlib.contextmanager
    def taking_part(self, names: Iterable[str]) -> Iterator[None]:
        """Make sides, which have taken a step when the block begins, and let go of them behind it: memory is
        for what is compared. Their losses must be one."""
        for name in names:
            plan = self.plans[name]
            everywhere = name == sides.ALONE and self.world.rank < 2  # to sum up two speeds
            here = self.world.rank < plan.num_ranks or everywhere
            world = self.by_size[plan.num_ranks] if here else None
            self.all[name] = side = Side(plan, world, self.make, self.batches)
            side.run(1)
        mine = {name: side.last.loss for name, side in self.all.items() if side.here}
        if mine:
            refuse_other_losses(mine, random=self.random)
        yield
        for side in self.all.values():
            if side.here:
                side.pipe.close(keeps_model=False)
        self.all.clear()
        gc.collect()

    def speeds(self) -> dict[str, Any]:
        """Runs of two ranks, of which one takes its time, beside each of them on its own."""
        taken: dict[str, Any] = {}
        for factor in self.config.factors:
            names = [sides.EVEN, *([name] if (name := sides.weighted(factor)) in self.plans else [])]
            with self.taking_part([sides.ALONE, *names]):
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
        with self.taking_part(names):
            for name in names:
                self.all[name].spans.clear()
            steps = self.config.steps
            turns = {name: functools.partial(self.all[name].run, steps) for name in names}
            runs = alternate(turns, self.config.repeats)
            if self.world.rank:
                return {}
            return {
                name: {"seconds": runs[name], "simulated": side.simulated(), "update": side.updates()}
                for name, side in self.all.items()
            }

    def bytes(self) -> dict[str, Any]:
        """What a step of every side sends, by what it is: frames by their own sizes, the exchange and all by
        what the system counted of every process."""
        return {name: self._bytes(name) for name in sides.PARTS["bytes"]}

    def _bytes(self, name: str) -> dict[str, Any]:
        with self.taking_part([name]):
            return self._counted(self.all[name])

    def _counted(self, side: Side) -> dict[str, Any]:
        exchanged, total, frames = [0], 0, (0, 0)
        if side.here:
            update, replicas = side.pipe.update, side.pipe.engine.replicas
            plain, overlapping = update.exchange, replicas.backward

            def counted(stage: int) -> None:
                side.pipe.world.barrier()
                time.sleep(SETTLING_SECONDS)
                before = written()
                plain(stage)
                exchanged[0] += sides.wire_bytes(before, written())

            update.exchange = counted  # all of it: no slice goes out while the backward sends frames
            replicas.backward = lambda stage, micro_batch: contextlib.nullcontext()
            side.pipe.step(*next(side.batches))
            exchanged[0] = 0
            before = written()
            report = side.pipe.step(*next(side.batches))
            time.sleep(SETTLING_SECONDS)
            frames = tuple(sum(getattr(s, f"{way}_sent") for s in report.stages) for way in DIRECTIONS)
            total = sides.wire_bytes(before, written())
            update.exchange, replicas.backward = plain, overlapping
        rows = self.world.all_gather([total, exchanged[0]])
        if self.world.rank:
            return {}
        return {
            "activations": frames[0],
            "gradients": frames[1],
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
