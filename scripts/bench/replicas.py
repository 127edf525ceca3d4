"""Worth of several ranks for one stage: unlike speeds, more ranks than stages, exact sums, bytes sent.

All sides live in the same processes and take turns. A side of fewer ranks than there are has a world of the
first of them, and the others wait at a barrier, so that a busy machine is busy for all sides alike."""

from __future__ import annotations

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
from harness import Job, Options, Results, alternate, ratio_of_pairs, spread

from penstock.compression.errors import ConfigError
from penstock.pipeline.distributed.launcher import init
from penstock.pipeline.distributed.process_group import World
from penstock.pipeline.partition.partition import partition
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.run.metrics import DIRECTIONS
from penstock.pipeline.run.planning import look, model_name
from penstock.pipeline.run.run_folder import RunFolder
from penstock.pipeline.run.training_loop import loss
from penstock.pipeline.schedules.instruction import Instruction, Op, Span
from penstock.pipeline.schedules.replicated import step_programs
from penstock.pipeline.schedules.simulate import durations, simulate, simulate_plan
from penstock.stages.plan.plan import Plan
from penstock.stages.units import show_bytes

ALONE, EVEN, EXACT, WEIGHTED = "one rank", "[2]", "[2] exact", "[2] by speed"
UNLIKE, UNLIKE_EXACT = "[1, 2]", "[1, 2] exact"
TWO, THREE, SAME = "two stages", "three stages", "two stages, cut as [1, 2]"
SIDES: dict[str, dict[str, Any]] = {
    ALONE: {"stages": 1, "ranks": 1},
    EVEN: {"replicas": [2]},
    EXACT: {"replicas": [2], "exact": True},
    UNLIKE: {"replicas": [1, 2]},
    UNLIKE_EXACT: {"replicas": [1, 2], "exact": True},
    TWO: {"stages": 2},
    THREE: {"stages": 3},
    SAME: {"stages": 2},
}
"""Options of ``partition`` by side."""

CUT_AS = {SAME: UNLIKE, UNLIKE_EXACT: UNLIKE}
PARTS: dict[str, tuple[str, ...]] = {
    "speeds": (ALONE, EVEN),
    "stages": (TWO, THREE, UNLIKE, SAME),
    "exact": (ALONE, EVEN, EXACT),
    "bytes": (EVEN, EXACT, UNLIKE, UNLIKE_EXACT, THREE),
}
"""Sides of each part; those of ``stages`` and ``exact`` are compared with the first."""

COUNTED = Path("/proc/self/io")
"""Counts what this process writes, to sockets too."""

SETTLING_SECONDS = 0.02
"""Until what was sent before an exchange has left."""


def options() -> Any:
    """Return the parser of the command line."""
    made = harness.parser(__doc__, job="data=digits batch_size=96 micro_batches=12 threads=1 codec=raw")
    listed, count = harness.list_of, harness.at_least(1)
    add = made.add_argument
    add(
        "--parts",
        type=listed(harness.name_of(tuple(PARTS))),
        default=list(PARTS),
        help=f"of {', '.join(PARTS)}",
    )
    factors = "times as long as the other rank that one of two takes, in the part speeds"
    add("--factors", type=listed(count), default=[1, 2, 4, 8], help=factors)
    add("--steps", type=count, default=2, help="steps of a run")
    alone = "seconds that each rank trains alone, for the summed speed"
    add("--seconds", type=harness.between(0), default=2.0, help=alone)
    return made


def bench(asked: Options, path: Path) -> Results:
    """Measure the parts on one set of ranks, and show them."""
    defaults = {"batch_size": 96, "micro_batches": 12, "threads": 1, "codec": "raw"}
    config = harness.train_config(asked.job, defaults, {"ranks": 1})
    if config.micro_batches < 2:
        raise ConfigError(
            f"replicas share micro-batches, found micro_batches={config.micro_batches}; take 2 of them"
        )
    if "bytes" in asked.parts and not COUNTED.exists():
        raise ConfigError(f"the part bytes reads {COUNTED}, which is not there; leave it out")
    job = Job(config)
    plans = plans_of(asked, job)
    facts = {name: getattr(asked, name) for name in ("parts", "factors", "steps", "seconds", "repeats")}
    facts |= {name: getattr(config, name) for name in (*defaults, "seed")} | {"model": model_name(config)}
    results = Results(path, job=facts, plans={name: described(plan) for name, plan in plans.items()})
    with results.folder().private() as folder:
        ranks = max(2, *(plan.num_ranks for plan in plans.values()))
        found = harness.measure_on_ranks("replicas", folder, asked, config, plans, ranks=ranks)
    for part in asked.parts:
        if part == "speeds":
            rows = speed_rows(found[part], config.batch_size)
        elif part == "bytes":
            rows = byte_rows(found[part], plans)
        else:
            rows = turn_rows(found[part], plans)
        results.keep(**{part: rows})
        harness.show(rows, COLUMNS[part], title=part)
    return results


def plans_of(asked: Options, job: Job) -> dict[str, Plan]:
    """Plan every side from one measurement of the model; with the part speeds also shares by speed."""
    config, plans = job.config, dict[str, Plan]()
    profile = look(config, job.samples)
    common: dict[str, Any] = {
        "micro_batches": config.micro_batches,
        "codec": config.codec,
        "extra_in_flight": 0,
    }
    names = list(dict.fromkeys(name for part in asked.parts for name in PARTS[part]))
    for name in dict.fromkeys([*(CUT_AS[name] for name in names if name in CUT_AS), *names]):
        cuts = {"cuts": plans[CUT_AS[name]].cuts} if name in CUT_AS else {}
        plans[name] = partition(profile, **SIDES[name], **cuts, **common)
    for factor in asked.factors if "speeds" in asked.parts else ():
        slow = max(1, round(config.micro_batches / (1 + factor)))
        shares = [config.micro_batches - slow, slow]
        plans[f"{WEIGHTED} 1:{factor}"] = partition(profile, replicas=[2], shares=shares, **common)
    return plans


def described(plan: Plan) -> dict[str, Any]:
    """Facts of a plan, with its step as it was predicted."""
    return {
        "replicas": list(plan.replicas),
        "cuts": list(plan.cuts),
        "exact": plan.exact,
        "seconds_of_stages": [stage.forward_seconds + stage.backward_seconds for stage in plan.stages],
        "predicted": simulate_plan(plan, step_programs(plan)).seconds,
    }


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
    """Rows of sides that took turns: times as fast as the first, and the step simulated and predicted."""
    first, *_ = found
    rows = []
    for name, one in found.items():
        row = {"side": name, "ranks": plans[name].num_ranks, "seconds": statistics.median(one["seconds"])}
        row |= {"seconds_of_runs": one["seconds"], "simulated": one["simulated"], "update": one["update"]}
        row |= {"predicted": described(plans[name])["predicted"]}
        rows.append(row | ratio_of_pairs(found[first]["seconds"], one["seconds"]))
    return rows


def byte_rows(found: Mapping[str, Any], plans: Mapping[str, Plan]) -> list[dict[str, Any]]:
    """Rows of bytes that all ranks send in a step; ``rest`` is no frame and no exchange."""
    rows = []
    for name, one in found.items():
        exchange, total = (sum(one[f"{what}_of_ranks"]) for what in ("exchange", "total"))
        counts = zip(one["parameters"], plans[name].replicas, strict=True)
        replicated = sum(size for size, number in counts if number > 1)
        rest = total - exchange - one["activations"] - one["gradients"]
        row = {"side": name, **one, "exchange": exchange, "total": total, "rest": rest}
        rows.append(row | {"of_parameters": exchange / replicated if replicated else None})
    return rows


_TURNS: dict[str, Any] = {
    "side": "{side}",
    "ranks": "{ranks}",
    "step": "{seconds:.3f} s",
    "as fast": lambda row: f"{row['speedup']:.2f}x ({spread(row['speedup_of_pairs'])})",
    "simulated": "{simulated:.3f} s",
    "predicted": "{predicted:.3f} s",
    "update": "{update:.3f} s",
}
COLUMNS: dict[str, dict[str, Any]] = {
    "speeds": {
        "side": "{side}",
        "speeds": "1:{factor}",
        "samples/s": "{samples_per_second:.0f}",
        "summed": lambda row: f"{statistics.median(map(sum, row['summed_of_runs'])):.0f}",
        "share": lambda row: f"{row['share']:.2f} ({spread(row['share_of_pairs'])})",
        "at most": "{bound:.2f}",
    },
    "stages": _TURNS,
    "exact": _TURNS,
    "bytes": {
        "side": "{side}",
        **{
            kind: lambda row, kind=kind: show_bytes(row[kind])
            for kind in ("activations", "gradients", "exchange", "rest", "total")
        },
        "of the parameters": "{of_parameters:.2f}x",
    },
}


class Side:
    """A pipeline on the first ranks, of which this is one if ``world`` is one.

    ``factor``: how many times as long as it takes each forward and backward of this rank lasts."""

    def __init__(self, plan: Plan, world: World | None, make: Callable[..., Pipeline], batches: Any) -> None:
        self.plan, self.here, self.factor = plan, world is not None, 1.0
        self.batches, self.spans = cycle(batches), list[Span]()
        if world is not None:
            self.pipe = make(plan, world)
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
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps if self.here else 0):
            self.last = self.pipe.step(*next(self.batches))
        if self.here:
            self.spans += self.pipe.timeline()
        dist.barrier()
        self.factor = 1.0
        return (time.perf_counter() - start) / steps

    def simulated(self) -> float:
        """Seconds of a step if each instruction took its usual time, and messages none."""
        known = durations(self.spans)

        def work(one: Instruction) -> float:
            return known.get((one.stage, one.op.value), 0.0)

        return simulate(self.pipe.meter.step.messages, work=work, transfer=lambda _: 0.0).seconds


def update_seconds(spans: Sequence[Span]) -> float:
    """Seconds of an update with its exchange, of the slowest stage, on the rank that waits least."""
    found: dict[int, dict[int, list[float]]] = {}
    for span in spans:
        if span.op == Op.U.value:
            found.setdefault(span.stage, {}).setdefault(span.rank, []).append(span.end - span.start)
    return max(statistics.median(map(min, zip(*ranks.values(), strict=True))) for ranks in found.values())


class Sides:
    """Sides of this rank, of which those of one part exist at a time, and the world of all ranks."""

    def __init__(self, asked: Options, folder: RunFolder) -> None:
        config = folder.read_config()
        self.asked, self.world, self.job = asked, init(deadline=config.deadline), Job(config)
        made = [dist.new_group(list(range(number))) for number in range(2, self.world.size)]
        groups = [group for group in made if isinstance(group, dist.ProcessGroup)]  # its own
        self.worlds = {world.size: world for world in (World(g, deadline=config.deadline) for g in groups)}
        self.by_size = self.worlds | {1: World.alone(), self.world.size: self.world}
        self.plans, self.batches, self.sides = (
            harness.load_plans(folder),
            self.job.batches(),
            dict[str, Side](),
        )

    def _make(self, plan: Plan, world: World) -> Pipeline:
        config = self.job.config
        common: Any = {"seed": config.seed, "deadline": config.deadline, "optimizer": self.job.optimizer}
        return Pipeline(self.job.model(), plan, loss=loss, world=world, **common)

    @contextlib.contextmanager
    def part(self, names: Iterable[str]) -> Iterator[None]:
        """Make sides, which take a step with one loss, and free their memory after the block."""
        for name in names:
            plan = self.plans[name]
            here = self.world.rank < plan.num_ranks or (name == ALONE and self.world.rank < 2)
            world = self.by_size[plan.num_ranks] if here else None
            self.sides[name] = side = Side(plan, world, self._make, self.batches)
            side.run(1)
        losses = {name: side.last.loss for name, side in self.sides.items() if side.here}
        if losses:
            harness.refuse_other_losses(losses, random=harness.is_random(self.job.model()))
        yield
        for side in self.sides.values():
            if side.here:
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
            side.factor = 1.0
        return [row[0] for row in self.world.all_gather([speed])][:2]

    def turns(self, part: str) -> dict[str, Any]:
        """Seconds of a step of every side of a part, in turn."""
        with self.part(PARTS[part]):
            for side in self.sides.values():
                side.spans.clear()
            turns = {n: functools.partial(side.run, self.asked.steps) for n, side in self.sides.items()}
            runs = alternate(turns, self.asked.repeats)
            if self.world.rank:
                return {}
            return {
                name: {
                    "seconds": runs[name],
                    "simulated": side.simulated(),
                    "update": update_seconds(side.spans),
                }
                for name, side in self.sides.items()
            }

    def bytes(self) -> dict[str, Any]:
        """Bytes that a step of every side sends: frames by their sizes, exchange and total as counted."""
        found = {}
        for name in PARTS["bytes"]:
            with self.part([name]):
                found[name] = self._count(self.sides[name])
        return found

    def _count(self, side: Side) -> dict[str, Any]:
        exchanged, total, frames = 0, 0, (0, 0)
        if side.here:
            update, replicas = side.pipe.update, side.pipe.engine.replicas
            exchange, backward = update.exchange, replicas.backward

            def counted(stage: int) -> None:
                nonlocal exchanged
                side.pipe.world.barrier()
                time.sleep(SETTLING_SECONDS)
                before = written()
                exchange(stage)
                exchanged += written() - before

            update.exchange = counted  # all at once: no slice goes out while the backward sends frames
            replicas.backward = lambda stage, micro_batch: contextlib.nullcontext()  # pyright: ignore[reportAttributeAccessIssue]
            side.pipe.step(*next(side.batches))
            exchanged, before = 0, written()
            report = side.pipe.step(*next(side.batches))
            time.sleep(SETTLING_SECONDS)
            total = written() - before
            frames = tuple(sum(getattr(s, f"{way}_sent") for s in report.stages) for way in DIRECTIONS)
            update.exchange, replicas.backward = exchange, backward  # pyright: ignore[reportAttributeAccessIssue]
        rows = self.world.all_gather([total, exchanged])
        return {
            "activations": frames[0],
            "gradients": frames[1],
            "exchange_of_ranks": [int(row[1]) for row in rows],
            "total_of_ranks": [int(row[0]) for row in rows],
            "parameters": [4 * stage.num_parameters for stage in side.plan.stages],
        }


def written() -> int:
    """Bytes that this process wrote so far."""
    pairs = (line.split(":") for line in COUNTED.read_text().splitlines())
    return int(dict(pairs)["wchar"])


def race_rank(folder: RunFolder, asked: Options) -> dict[str, Any]:
    """Take part on this rank; return what was measured by part."""
    sides = Sides(asked, folder)
    runs = {"speeds": sides.speeds, "bytes": sides.bytes}
    found = {part: runs[part]() if part in runs else sides.turns(part) for part in asked.parts}
    for world in (*sides.worlds.values(), sides.world):
        world.close()
    return found


if __name__ == "__main__":
    harness.main(options(), bench, rank=race_rank)
