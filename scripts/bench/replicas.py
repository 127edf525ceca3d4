"""Worth of several ranks for one stage: unlike speeds, exact sums, more ranks than stages.

All sides live in the same processes and take turns. A side of fewer ranks than there are has a world of the
first of them, and the others wait at a barrier, so that a busy machine is busy for all sides alike."""

import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import harness
import torch.distributed as dist
from harness import Job, Options, Results, alternate, ratio_of_pairs, spread, together

from penstock.compression.errors import ConfigError
from penstock.pipeline.distributed.launcher import init
from penstock.pipeline.distributed.process_group import World
from penstock.pipeline.partition.partition import partition
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.run.losses import cross_entropy as loss
from penstock.pipeline.run.planning import model_name, record
from penstock.pipeline.run.run_folder import RunFolder
from penstock.pipeline.schedules.instruction import Op
from penstock.pipeline.schedules.replicated import step_programs
from penstock.pipeline.schedules.simulate import simulate_plan
from penstock.stages.plan.plan import Plan

ALONE, EVEN, EXACT, WEIGHTED = "one rank", "[2]", "[2] exact", "[2] by speed"
# Options of ``partition`` by side.
SIDES: dict[str, dict[str, Any]] = {
    ALONE: {"stages": 1, "ranks": 1},
    EVEN: {"replicas": [2]},
    EXACT: {"replicas": [2], "exact": True},
    "[1, 2]": {"replicas": [1, 2]},
    "two stages": {"stages": 2},
    "three stages": {"stages": 3},
}
# Sides of each part; those of ``stages`` and ``exact`` are compared with the first.
PARTS: dict[str, tuple[str, ...]] = {
    "speeds": (ALONE, EVEN),
    "stages": ("two stages", "three stages", "[1, 2]"),
    "exact": (ALONE, EVEN, EXACT),
}
SPEED_COLUMNS: dict[str, Any] = {
    "side": "{side}",
    "speeds": "1:{factor}",
    "samples/s": "{samples_per_second:.0f}",
    "summed": lambda row: f"{statistics.median(map(sum, row['summed_of_runs'])):.0f}",
    "share": lambda row: f"{row['share']:.2f} ({spread(row['share_of_pairs'])})",
    "at most": "{bound:.2f}",
}
TURN_COLUMNS: dict[str, Any] = {
    "side": "{side}",
    "ranks": "{ranks}",
    "step": "{seconds:.3f} s",
    "as fast": lambda row: f"{row['speedup']:.2f}x ({spread(row['speedup_of_pairs'])})",
    "predicted": "{predicted:.3f} s",
}


def options() -> Any:
    """Return the parser of the command line."""
    made = harness.parser(__doc__, job="data=digits batch_size=96 micro_batches=12 threads=1 codec=raw")
    listed, count, add = harness.list_of, harness.at_least(1), made.add_argument
    add("--parts", type=listed(known=PARTS), default=list(PARTS), help=f"of {', '.join(PARTS)}")
    factors = "times as long as the other rank that one of two takes, in the part speeds"
    add("--factors", type=listed(count), default=[1, 2, 4, 8], help=factors)
    add("--steps", type=count, default=2, help="steps of a run")
    alone = "seconds that each rank trains alone, for the summed speed"
    add("--seconds", type=harness.at_least(0.0), default=2.0, help=alone)
    return made


def bench(asked: Options, path: Path) -> Results:
    """Measure the parts on one set of ranks, and show them."""
    defaults = {"batch_size": 96, "micro_batches": 12, "threads": 1, "codec": "raw"}
    config = harness.train_config(asked.job, defaults, {"ranks": 1})
    if config.micro_batches < 2:
        raise ConfigError(f"replicas share micro-batches, found micro_batches={config.micro_batches}; take 2")
    plans = plans_of(asked, Job(config))
    facts = {name: getattr(asked, name) for name in ("parts", "factors", "steps", "seconds", "repeats")}
    facts |= {name: getattr(config, name) for name in (*defaults, "seed")} | {"model": model_name(config)}
    results = Results(path, job=facts, cuts={name: list(plan.cuts) for name, plan in plans.items()})
    with results.folder().private() as folder:
        ranks = max(2, *(plan.num_ranks for plan in plans.values()))
        found = harness.measure_on_ranks("replicas", folder, asked, config, plans, ranks=ranks)
    for part in asked.parts:
        speeds = part == "speeds"
        rows = speed_rows(found[part], config.batch_size) if speeds else turn_rows(found[part], plans)
        results.keep(**{part: rows})
        harness.show(rows, SPEED_COLUMNS if speeds else TURN_COLUMNS, title=part)
    return results


def plans_of(asked: Options, job: Job) -> dict[str, Plan]:
    """Plan every side from one measurement of the model; with the part speeds also shares by speed."""
    config = job.config
    profile = record(config, job.samples).measure()
    common: Any = {"micro_batches": config.micro_batches, "codec": config.codec, "extra_in_flight": 0}
    names = dict.fromkeys(name for part in asked.parts for name in PARTS[part])
    plans = {name: partition(profile, **SIDES[name], **common) for name in names}
    for factor in asked.factors if "speeds" in asked.parts else ():
        slow = max(1, round(config.micro_batches / (1 + factor)))
        shares = [config.micro_batches - slow, slow]
        plans[f"{WEIGHTED} 1:{factor}"] = partition(profile, replicas=[2], shares=shares, **common)
    return plans


def speed_rows(found: Mapping[str, Any], batch_size: int) -> list[dict[str, Any]]:
    """Rows of two ranks of which one is slower: the share of the speed that both have alone, summed up.

    With even shares both wait for the slow one, so 2 / (1 + factor) is the most."""
    rows = []
    for factor, turns in found.items():
        summed = [sum(speeds) for speeds in turns[ALONE]]
        for name in (side for side in turns if side != ALONE):
            speeds = [batch_size / seconds for seconds in turns[name]]
            bound = 2 / (1 + int(factor)) if name == EVEN else 1.0
            row = {"side": name if name == EVEN else WEIGHTED, "factor": int(factor), "bound": bound}
            row |= {"samples_per_second": statistics.median(speeds), "samples_per_second_of_runs": speeds}
            rows.append(row | {"summed_of_runs": turns[ALONE]} | ratio_of_pairs(speeds, summed, "share"))
    return rows


def turn_rows(found: Mapping[str, Any], plans: Mapping[str, Plan]) -> list[dict[str, Any]]:
    """Rows of sides that took turns: times as fast as the first, and the predicted step."""
    first, *_ = found.values()
    rows = []
    for name, seconds in found.items():
        row = {"side": name, "ranks": plans[name].num_ranks, "seconds": statistics.median(seconds)}
        row |= {"predicted": simulate_plan(plans[name], step_programs(plans[name])).seconds}
        rows.append(row | {"seconds_of_runs": seconds} | ratio_of_pairs(first, seconds))
    return rows


class Side:
    """A pipeline on the first ranks, of which this is one if ``world`` is one.

    ``factor``: how many times as long as it takes each forward and backward of this rank lasts."""

    def __init__(self, plan: Plan, world: World | None, job: Job, batches: Sequence[Any]) -> None:
        self.here, self.factor, self.batches = world is not None, 1.0, cycle(batches)
        if world is not None:
            common: Any = {"seed": job.config.seed, "deadline": job.config.deadline, "loss": loss}
            self.pipe = Pipeline(job.model(), plan, world=world, optimizer=job.optimizer, **common)
            run = self.pipe.engine.run
            for op in (Op.F, Op.B):
                run[op] = functools.partial(self._slow_down, run[op])

    def _slow_down(self, run: Callable[..., None], *work: Any) -> None:
        start = time.thread_time()  # that of other programs on this core is not multiplied
        run(*work)
        if self.factor > 1:
            time.sleep((self.factor - 1) * (time.thread_time() - start))

    def run(self, steps: int, factor: float = 1.0) -> float:
        """Take steps together with the other ranks; return the seconds of one."""
        self.factor = factor
        return together(self._step if self.here else lambda: None, steps)

    def _step(self) -> None:
        self.last = self.pipe.step(*next(self.batches))


class Sides:
    """Sides of this rank, of which those of one part exist at a time, and the world of all ranks."""

    def __init__(self, asked: Options, folder: RunFolder) -> None:
        config = folder.read_config()
        self.asked, self.world, self.job = asked, init(deadline=config.deadline), Job(config)
        made = [dist.new_group(list(range(number))) for number in range(2, self.world.size)]
        groups = [group for group in made if isinstance(group, dist.ProcessGroup)]  # its own
        self.worlds = {world.size: world for world in (World(g, deadline=config.deadline) for g in groups)}
        self.by_size = self.worlds | {1: World(), self.world.size: self.world}
        self.plans, self.batches = harness.load_plans(folder), self.job.batches()
        self.sides: dict[str, Side] = {}

    @contextlib.contextmanager
    def part(self, names: Iterable[str]) -> Iterator[None]:
        """Make sides, which take a step with one loss, and free their memory after the block."""
        for name in names:
            plan = self.plans[name]
            here = self.world.rank < plan.num_ranks or (name == ALONE and self.world.rank < 2)
            world = self.by_size[plan.num_ranks] if here else None
            self.sides[name] = side = Side(plan, world, self.job, self.batches)
            side.run(1)
        ours = {name: side for name, side in self.sides.items() if side.here}
        if losses := {name: side.last.loss for name, side in ours.items()}:
            harness.refuse_other_losses(losses, self.job.model())
        yield
        for side in ours.values():
            side.pipe.close(keeps_model=False)
        self.sides.clear()
        gc.collect()

    def speeds(self) -> dict[str, Any]:
        """Runs of two ranks, of which one is slowed down, and of each of them alone."""
        taken: dict[str, Any] = {}
        for factor in self.asked.factors:
            names, own = [EVEN, f"{WEIGHTED} 1:{factor}"], factor if self.world.rank == 1 else 1.0
            with self.part([ALONE, *names]):
                turns: dict[str, Any] = {ALONE: functools.partial(self._alone, own)}
                turns |= {n: functools.partial(self.sides[n].run, self.asked.steps, own) for n in names}
                taken[str(factor)] = alternate(turns, self.asked.repeats)
        return taken

    def _alone(self, factor: float) -> list[float]:
        """Samples per second of each of two ranks, at the same time."""
        side, speed = self.sides[ALONE], 0.0
        dist.barrier()
        if side.here:
            side.factor = factor
            start, steps = time.perf_counter(), 0
            while not steps or time.perf_counter() - start < self.asked.seconds:
                side.pipe.step(*next(side.batches))
                steps += 1
            speed = steps * self.job.config.batch_size / (time.perf_counter() - start)
        return [row[0] for row in self.world.all_gather([speed])][:2]

    def turns(self, part: str) -> dict[str, Any]:
        """Seconds of a step of every side of a part, in turn."""
        with self.part(PARTS[part]):
            turns = {n: functools.partial(side.run, self.asked.steps) for n, side in self.sides.items()}
            return alternate(turns, self.asked.repeats)


def race_rank(folder: RunFolder, asked: Options) -> dict[str, Any]:
    """Take part on this rank; return what was measured by part."""
    sides = Sides(asked, folder)
    found = {part: sides.speeds() if part == "speeds" else sides.turns(part) for part in asked.parts}
    for world in (*sides.worlds.values(), sides.world):
        world.close()
    return found


if __name__ == "__main__":
    harness.main(options(), bench, rank=race_rank)
